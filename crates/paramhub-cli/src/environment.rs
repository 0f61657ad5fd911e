//! Variables of the environment that begin with `PARAMHUB_` but that no part reads.

use clap::Command;

use crate::config::distance;

const PREFIX: &str = "PARAMHUB_";

/// Variables that workers, the Python package or its bindings read and that no flag stands for.
const OF_WORKERS: [&str; 8] = [
    paramhub_kernels::ISA_VARIABLE,
    "PARAMHUB_JOB",
    "PARAMHUB_SECRET",
    "PARAMHUB_TRANSPORT",
    "PARAMHUB_INTERFACES",
    "PARAMHUB_HOST",
    "PARAMHUB_TRACE",
    "PARAMHUB_RUN_ID",
];

/// One line for each variable of the environment that begins with `PARAMHUB_` and that neither the command line nor a worker reads.
pub fn unread_variables() -> Vec<String> {
    let mut known: Vec<String> = OF_WORKERS.map(str::to_owned).into();
    collect(&super::command(), &mut known);
    let mut names: Vec<String> = std::env::vars_os()
        .filter(|(_, value)| !value.is_empty())
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| name.starts_with(PREFIX) && !known.contains(name) && !is_of_others(name))
        .collect();
    names.sort();
    names.into_iter().map(|name| explain(&name, &known)).collect()
}

fn collect(command: &Command, known: &mut Vec<String>) {
    for argument in command.get_arguments() {
        known.extend(argument.get_env().and_then(|name| name.to_str()).map(str::to_owned));
    }
    command.get_subcommands().for_each(|subcommand| collect(subcommand, known));
}

/// Returns whether the project's tests set the variable, or `train` reads it in a program that has it, or
/// Kubernetes sets it: in every container where a Service is called `paramhub` or its name begins so.
fn is_of_others(name: &str) -> bool {
    let rest = &name[PREFIX.len()..];
    rest.starts_with("TEST_")
        || rest.starts_with("FUZZ_")
        || (cfg!(not(feature = "demonstrations")) && rest.starts_with("TRAIN_"))
        || rest == "PORT"
        || rest.ends_with("_PORT")
        || rest.contains("SERVICE_HOST")
        || rest.contains("SERVICE_PORT")
        || ["_TCP", "_UDP", "_SCTP"].iter().any(|protocol| rest.contains("PORT_") && rest.contains(protocol))
}

fn explain(name: &str, known: &[String]) -> String {
    let nearest = known.iter().min_by_key(|known| distance(name, known));
    let length = name.len() - PREFIX.len();
    match nearest.filter(|nearest| distance(name, nearest) <= length.max(nearest.len() - PREFIX.len()) / 2) {
        Some(nearest) => format!("the environment sets {name}, which nothing reads: did you mean {nearest}?"),
        None => format!(
            "the environment sets {name}, which nothing reads: `paramhub VERB --help` names what is read"
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_variable_gets_the_nearest_one_that_is_read() {
        let known: Vec<String> = ["PARAMHUB_HUB_CORES", "PARAMHUB_URL"].map(str::to_owned).into();
        let explained = explain("PARAMHUB_HUB_CORE", &known);
        assert!(explained.ends_with("did you mean PARAMHUB_HUB_CORES?"), "{explained}");
        let explained = explain("PARAMHUB_ZZZZZZZZZZZZ", &known);
        assert!(explained.contains("names what is read"), "{explained}");
    }

    /// Every quoted name in the shipped sources. A name that a part begins to read must be known here, or
    /// users would be warned that nothing reads it.
    #[test]
    fn every_variable_that_is_read_is_known() {
        let mut known: Vec<String> = OF_WORKERS.map(str::to_owned).into();
        collect(&super::super::command(), &mut known);
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut folders = vec![root.join("crates"), root.join("python/paramhub")];
        let mut read = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                let is_source =
                    ["rs", "py"].iter().any(|kind| path.extension().is_some_and(|its| its == *kind));
                if path.is_dir() && !["tests", "target", "benches"].contains(&name.as_str()) {
                    folders.push(path);
                } else if is_source && !path.ends_with("paramhub-cli/src/environment.rs") {
                    let text = std::fs::read_to_string(&path).unwrap();
                    let quoted = text.split(['"', '\'']).filter(|part| part.starts_with(PREFIX));
                    let is_name =
                        |part: &&str| part.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
                    read.extend(
                        quoted.filter(is_name).filter(|name| name.len() > PREFIX.len()).map(str::to_owned),
                    );
                }
            }
        }
        assert!(read.len() > 50, "names were found: {read:?}");
        let unknown: Vec<&String> =
            read.iter().filter(|name| !known.contains(name) && !is_of_others(name)).collect();
        assert!(unknown.is_empty(), "read somewhere, and not known to the command line: {unknown:?}");
    }

    #[test]
    fn variables_of_kubernetes_services_are_not_ours() {
        for name in [
            "PARAMHUB_SERVICE_HOST",
            "PARAMHUB_SERVICE_PORT_MANAGER",
            "PARAMHUB_PORT",
            "PARAMHUB_MANAGER_PORT",
            "PARAMHUB_PORT_7770_TCP_ADDR",
            "PARAMHUB_MORE_SERVICE_HOST",
        ] {
            assert!(is_of_others(name), "{name}");
        }
        for name in ["PARAMHUB_HUB_CORE", "PARAMHUB_MANAGER_STAT", "PARAMHUB_TRASNPORT"] {
            assert!(!is_of_others(name), "{name}");
        }
    }
}
