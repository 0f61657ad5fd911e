//! The table.

mod commands;
mod jobs;
mod losses;

use super::Topic;

/// The table, by subject.
pub static TOPICS: &[Topic] = &[
    Topic { title: "Settings of a job", rules: jobs::SETTINGS },
    Topic { title: "Schemes of layers", rules: jobs::SCHEMES },
    Topic { title: "Hubs of racks and hosts", rules: jobs::SITES },
    Topic { title: "Interfaces that go down", rules: jobs::INTERFACES },
    Topic { title: "Encrypted streams", rules: jobs::ENCRYPTION },
    Topic { title: "Late workers", rules: jobs::STRAGGLERS },
    Topic { title: "Lost workers", rules: losses::WORKER_LOSS },
    Topic { title: "Replicas", rules: losses::REPLICAS },
    Topic { title: "Jobs without hubs", rules: jobs::NO_HUBS },
    Topic { title: "Checkpoints", rules: jobs::CHECKPOINTS },
    Topic { title: "A worker's own options", rules: jobs::WORKERS },
    Topic { title: "Exchanges of `train` and of key-value stores", rules: commands::EXCHANGES },
    Topic { title: "Workers that `train` kills", rules: commands::CHAOS },
    Topic { title: "Launchers", rules: commands::LAUNCHERS },
    Topic { title: "Hubs", rules: commands::HUBS },
];
