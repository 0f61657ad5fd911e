//! `paramhub doctor`: what this machine offers and what is missing, in plain words.

mod loopback;
mod machine;

use clap::Args;
use serde::Serialize;

use super::{ManagerUrl, client};
use crate::ExitCode;
use crate::config::Config;

#[derive(Args)]
#[command(args_override_self = true)]
pub(super) struct DoctorFlags {
    #[command(flatten)]
    url: ManagerUrl,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The form of the findings.
pub(super) struct DoctorTask {
    json: bool,
}

impl DoctorFlags {
    pub(super) fn apply(self, config: &mut Config) -> DoctorTask {
        self.url.apply(config);
        DoctorTask { json: self.json }
    }
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Grade {
    Ok,
    /// The part works, but not as well as it could, or not for everything.
    Warn,
    /// A hub or its workers would not run.
    Fail,
}

#[derive(Serialize)]
struct Finding {
    grade: Grade,
    what: &'static str,
    /// The finding, and the remedy if it is not good.
    text: String,
}

impl Finding {
    fn new(grade: Grade, what: &'static str, text: impl Into<String>) -> Self {
        Finding { grade, what, text: text.into() }
    }
}

pub(super) fn doctor(config: &Config, todo: DoctorTask) -> anyhow::Result<ExitCode> {
    let mut findings = machine::findings();
    findings.push(loopback::finding());
    if config.url.is_some() {
        findings.push(hub(config)?);
    }
    let worst_is_fail = findings.iter().any(|finding| finding.grade == Grade::Fail);
    if todo.json {
        println!("{}", serde_json::to_string_pretty(&findings)?);
    } else {
        for Finding { grade, what, text } in &findings {
            let grade = match grade {
                Grade::Ok => "ok  ",
                Grade::Warn => "warn",
                Grade::Fail => "fail",
            };
            println!("{grade}  {what:<12} {text}");
        }
    }
    Ok(if worst_is_fail { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Returns whether the connection manager answers.
fn hub(config: &Config) -> anyhow::Result<Finding> {
    let client = client(config)?;
    Ok(match client.hubs() {
        Ok(hubs) if hubs.is_empty() => Finding::new(
            Grade::Warn,
            "manager",
            format!(
                "{} answers, but no hub has joined it: start one with `paramhub hub --join`",
                client.url()
            ),
        ),
        Ok(hubs) => {
            let cores: usize = hubs.iter().map(|hub| hub.cores.len()).sum();
            let text = format!("{} answers: hubs {}, cores {cores}", client.url(), hubs.len());
            Finding::new(Grade::Ok, "manager", text)
        }
        Err(error) => Finding::new(Grade::Fail, "manager", error.to_string()),
    })
}
