//! `paramhub hubs`

use clap::{Args, Subcommand};
use comfy_table::{Table, presets};
use paramhub_core::service::{HubLabel, HubStatus, LinkStatus};
use serde::Serialize;

use super::{ManagerUrl, client};
use crate::ExitCode;
use crate::config::Config;

mod drain;

use drain::DrainFlags;

#[derive(Args)]
#[command(args_override_self = true)]
pub(super) struct HubsFlags {
    #[command(subcommand)]
    what: Option<HubsCommand>,
    /// The connection manager's URL [default: http://127.0.0.1:7770]
    #[arg(long, global = true, value_name = "URL", env = "PARAMHUB_URL")]
    hub: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Clone, Copy, Subcommand)]
enum HubsCommand {
    /// All hubs that have joined, and what is known of the network between their racks (the default)
    List,
    /// Let one hub of each rack probe the network to the others now, for half a second a pair, and print what it carries
    ///
    /// Refused while a job runs at these hubs. The reduction `auto` of later jobs goes by it.
    Probe,
    /// Have all jobs with standbys leave a hub, give it no new ones, and wait until it has none: then it can be stopped
    ///
    /// Jobs without standbys stay until they end. The hub stays drained if this command ends before that.
    Drain(DrainFlags),
}

pub(super) struct HubsTask {
    what: HubsCommand,
    json: bool,
}

impl HubsFlags {
    pub(super) fn apply(self, config: &mut Config) -> HubsTask {
        ManagerUrl { manager_url: self.hub }.apply(config);
        HubsTask { what: self.what.unwrap_or(HubsCommand::List), json: self.json }
    }
}

/// Printed with `--json`.
#[derive(Serialize)]
struct Report {
    hubs: Vec<HubStatus>,
    links: Vec<LinkStatus>,
}

pub(super) fn hubs(config: &Config, todo: HubsTask) -> anyhow::Result<ExitCode> {
    let client = client(config)?;
    let links = match todo.what {
        HubsCommand::List => client.links()?,
        HubsCommand::Probe => client.probe_links()?,
        HubsCommand::Drain(flags) => return drain::drain(&client, flags, todo.json),
    };
    let report = Report { hubs: client.hubs()?, links };
    if todo.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(ExitCode::SUCCESS);
    }
    if let HubsCommand::List = todo.what {
        println!("{}", list(&report.hubs));
    }
    if !report.links.is_empty() {
        println!("{}", table_of(&report.links));
    }
    Ok(ExitCode::SUCCESS)
}

fn list(hubs: &[HubStatus]) -> String {
    if hubs.is_empty() {
        return "no hubs".into();
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(["hub", "serves", "labels", "interfaces", "cores", "jobs", "last heard"]);
    for hub in hubs {
        let serves = match (hub.place.host.is_empty(), hub.place.rack.is_empty()) {
            (false, _) => "its host".to_owned(),
            (true, false) => format!("rack {}", hub.place.rack),
            (true, true) => "all workers".to_owned(),
        };
        let mut addresses: Vec<&str> = hub.shape.interfaces.iter().map(|i| i.address.as_str()).collect();
        addresses.dedup();
        let note = match (hub.drained, hub.unheard) {
            (true, _) => ": it is drained, and gets no new jobs",
            (false, true) => ": it gets no new jobs",
            (false, false) => "",
        };
        let last_heard = format!("{:.0} s ago{note}", hub.silent_s);
        table.add_row([
            hub.hub.to_string(),
            serves,
            hub.labels.iter().map(HubLabel::to_string).collect::<Vec<_>>().join(" "),
            addresses.join(" "),
            hub.cores.len().to_string(),
            hub.jobs.to_string(),
            last_heard,
        ]);
    }
    table.to_string()
}

fn table_of(links: &[LinkStatus]) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(["from rack", "to rack", "carries each way at once", "by hubs", "probed"]);
    for link in links {
        let rate = match link.rate {
            Some(rate) if link.is_at_least => format!("at least {rate}, which is all its hubs carry"),
            Some(rate) => rate.to_string(),
            None => link.problem.clone(),
        };
        let [from, to] = link.hubs;
        let probed = format!("{:.0} s ago", link.age_s);
        table.add_row([link.from.clone(), link.to.clone(), rate, format!("{from}, {to}"), probed]);
    }
    table.to_string()
}
