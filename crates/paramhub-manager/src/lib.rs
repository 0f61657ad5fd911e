//! The connection manager: jobs, rendezvous and hubs behind JSON over HTTP, with an embedded store.
