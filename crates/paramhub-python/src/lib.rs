//! `paramhub._native`: the functions that the Python package needs from Rust; users do not call them.
//!
//! The package in `python/paramhub` adds names, checks and documentation. This crate does the five things
//! that Python cannot: own a [`job::Job`] and its requests, call a key-value store ([`kvstore`]), read other
//! libraries' tensors ([`memory`]), run an embedded [`hub::Hub`], and run the command line. Every call that
//! may wait releases the GIL and answers Ctrl-C.

mod callbacks;
mod combinations;
mod command;
mod errors;
mod factors;
mod fork;
mod handle;
mod hub;
mod job;
mod join_options;
mod kvstore;
mod member;
mod memory;
mod mesh;
mod parts;
mod sealing;
mod slots;
mod tensor;
mod waiting;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::callbacks::end_callbacks;
    #[pymodule_export]
    use crate::combinations::conflict;
    #[pymodule_export]
    use crate::command::{main, unread_variables};
    #[pymodule_export]
    use crate::fork::after_fork_in_child;
    #[pymodule_export]
    use crate::handle::Handle;
    #[pymodule_export]
    use crate::hub::{Hub, create_job, ended_job, host_identity, stop_job};
    #[pymodule_export]
    use crate::job::Job;
    #[pymodule_export]
    use crate::kvstore::{Store, open_store};
    #[pymodule_export]
    use crate::member::{Member, connect};
    #[pymodule_export]
    use crate::memory::Memory;
    #[pymodule_export]
    use crate::mesh::{Mesh, MeshListener};
    #[pymodule_export]
    use crate::sealing::{admin_token, derive_secret, open_sealed, seal};
    #[pymodule_export]
    use crate::slots::Slots;
    #[pymodule_export]
    use crate::tensor::Tensor;
    #[pymodule_export]
    use crate::waiting::now_ns;

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
