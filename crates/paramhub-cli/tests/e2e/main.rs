//! The real program in real processes: hubs, launchers, workers, and what becomes of them when others die.

mod common;
mod e2e_bench;
mod e2e_bench_designs;
mod e2e_chaos;
mod e2e_checkpoints;
mod e2e_choose;
mod e2e_collectives;
mod e2e_config;
mod e2e_deployment;
mod e2e_encrypt;
mod e2e_endings;
mod e2e_failures;
mod e2e_hosts;
mod e2e_hub;
mod e2e_interfaces;
mod e2e_join;
mod e2e_losses;
mod e2e_neighbour;
mod e2e_plan;
mod e2e_probe;
mod e2e_racks;
mod e2e_redial;
mod e2e_resume;
mod e2e_run;
mod e2e_standbys;
mod e2e_stragglers;
mod e2e_teams;
mod e2e_tenants;
mod e2e_testbed;
mod e2e_tls;
mod e2e_train;
#[path = "../../../paramhub-mesh/tests/mesh/relay.rs"]
mod relay;
