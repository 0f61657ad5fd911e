//! Compiles the parts of `mpi.h` that only a C compiler can read.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "mpi")]
    compile();
}

#[cfg(feature = "mpi")]
fn compile() {
    println!("cargo::rerun-if-changed=src/in_place.c");
    let mut build = cc::Build::new();
    build.file("src/in_place.c");
    match build_probe_mpi::probe() {
        Ok(library) => match library.mpicc {
            Some(mpicc) => {
                build.compiler(mpicc);
            }
            None => {
                build.includes(library.include_paths);
            }
        },
        Err(reasons) => {
            let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
            panic!(
                "the feature `mpi` of paramhub-mpi needs an MPI with its headers (Debian's openmpi-bin, libopenmpi-dev and \
                 libclang-dev): {}",
                reasons.join("; ")
            );
        }
    }
    build.compile("paramhub_mpi_in_place");
}
