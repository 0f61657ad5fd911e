//! The licences of what is inside a wheel or a program and not this project's: their texts must go with it.
//!
//! They are made for each release and are not in the repository, where they would differ with every change of Cargo.lock.

use crate::command::Invocation;
use crate::environment::Environment;
use crate::stage::Failure;

use super::toolchain::TARGET;
use super::{failure, read};

/// The file's name in all artifacts.
pub(super) const FILE: &str = "THIRD_PARTY_LICENSES";

const TEXTS_OF_CRATES: &str = "xtask/src/release/licenses.py";
const HTML_TO_TEXT: &str = "xtask/src/release/rust_library.py";

pub(super) fn of_wheel(tools: &Environment) -> Result<String, Failure> {
    of_package("paramhub-python", tools)
}

pub(super) fn of_program(tools: &Environment) -> Result<String, Failure> {
    let digits = read("data/digits/README.md")?;
    Ok(format!("{}\n\nData inside the program: {digits}", of_package("paramhub-cli", tools)?))
}

fn of_package(package: &str, tools: &Environment) -> Result<String, Failure> {
    let list = tools.python().args([TEXTS_OF_CRATES, package, TARGET]);
    println!("$ {list}");
    let crates = list.output().ok_or_else(|| Failure {
        reason: format!("the licences of the crates in {package} cannot be listed"),
        rerun: Some(list.to_string()),
    })?;
    println!("{package}: the licences of its crates have {} lines", crates.lines().count());
    Ok(format!(
        "Inside this are the crates that are listed here, Rust's standard library, and parts of the compiler zig.\n\n\
         {crates}\n\n{}\n\n{}",
        of_the_standard_library(tools)?,
        of_zig(tools)?
    ))
}

/// The compiler comes with a page that has all notices of the library.
fn of_the_standard_library(tools: &Environment) -> Result<String, Failure> {
    let folder = Invocation::parse("rustc --print sysroot").output();
    let folder = folder.ok_or_else(|| failure("rustc does not say where it is"))?;
    let page = format!("{folder}/share/doc/rust/COPYRIGHT-library.html");
    let text = tools.python().args([HTML_TO_TEXT, &page]).output();
    text.ok_or_else(|| failure(format!("{page}, the notices of Rust's standard library, cannot be read")))
}

/// What zig links to a program: routines of its own. Those of LLVM, which unwind stacks, ask for no notice in programs.
fn of_zig(tools: &Environment) -> Result<String, Failure> {
    let find =
        "import importlib.util; print(importlib.util.find_spec('ziglang').submodule_search_locations[0])";
    let folder = tools.python().args(["-c", find]).output();
    let folder = folder.ok_or_else(|| failure("the package ziglang is not installed"))?;
    Ok(format!("zig\n\n{}", read(&format!("{folder}/LICENSE"))?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::release::enter_the_workspace;

    /// A dependency without a text would otherwise end a release, long after it came in.
    #[test]
    fn every_crate_that_is_linked_has_the_text_of_its_licence() {
        enter_the_workspace();
        if !Invocation::parse("python3 --version").succeeds() {
            println!("skipped: there is no python3");
            return;
        }
        for (package, linked) in [("paramhub-python", "\npyo3 "), ("paramhub-cli", "\nplotters ")] {
            let listed = Invocation::new("python3").args([TEXTS_OF_CRATES, package, TARGET]).output();
            let listed =
                listed.unwrap_or_else(|| panic!("python3 {TEXTS_OF_CRATES} {package} {TARGET} fails"));
            assert!(listed.contains(linked) && listed.contains("\nring "), "{package}: {listed}");
            assert!(!listed.contains("\nsyn "), "{package}: a procedural macro is not linked: {listed}");
        }
    }
}
