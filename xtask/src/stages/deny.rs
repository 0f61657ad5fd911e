//! Checks the dependencies against the rules in `deny.toml`.

use crate::stage::Failure;
use crate::tools::CargoTool;

static DENY: CargoTool = CargoTool { name: "cargo-deny", version: "0.20.2" };

pub(crate) fn check() -> Result<(), Failure> {
    let deny = DENY.find().map_or_else(|| DENY.install(), Ok)?;
    println!("advisories are left out: their database is a download; `cargo deny check advisories` reads it");
    deny.args(["check", "--hide-inclusion-graph", "licenses", "bans", "sources"]).run()?;
    Ok(())
}
