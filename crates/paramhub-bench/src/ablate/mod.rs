//! `paramhub bench ablate`: the worth of each choice of the design, measured against its alternative.

mod no_op;
mod report;
mod stream_per_worker;
mod variant;
mod wide;

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, value_parser};
use paramhub_harness::ExitCode;
use paramhub_harness::Usage;
use paramhub_harness::exchange::check_destination;
use paramhub_harness::exchange::driver::Program;
use paramhub_harness::exchange::hosts::Hosts;
use paramhub_harness::exchange::processes::{Run, interrupted, run};
use paramhub_harness::exchange::report::write_json;
use paramhub_harness::exchange::spec::Spec;
use paramhub_harness::exchange::{ExchangeFlags, check_memory};
use paramhub_harness::launch::Signals;

use super::rounds::order;
use report::{Ablation, VariantRounds};

pub(super) use no_op::{NoSum, NoUpdate};
pub(super) use stream_per_worker::{join as join_stream_per_worker, serve as serve_stream_per_worker};
pub(super) use variant::Variant;

/// Measure the hub with one design choice replaced, against the hub as it is
///
/// The baseline is the hub as it is. It and the variants are measured in rounds: every round runs every one of them, each
/// with fresh processes, every other round backwards. A factor is the variant's time divided by the baseline's of the same
/// round; the median of the rounds is shown. Results are checked as in `bench exchange`, except of variants that leave out
/// the sum or the update.
#[derive(Args)]
#[command(mut_arg("iters", |iters| iters.default_value("5").help("Iterations of a variant and round that count")))]
#[command(mut_arg("warmup", |warmup| warmup.default_value("1")))]
#[command(mut_arg("raw", |raw| raw.help("Also move as many bytes over bare TCP streams, in turn with the baseline")))]
pub struct AblateFlags {
    /// The variants to measure [default: all of them]
    #[arg(value_enum, value_name = "VARIANT")]
    variants: Vec<Variant>,
    /// How often every variant is measured
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Draw the results
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    exchange: ExchangeFlags,
}

pub(super) fn ablate(flags: &AblateFlags) -> anyhow::Result<ExitCode> {
    let signals = Signals::catch()?;
    check_destination("--json", flags.exchange.json.as_deref())?;
    check_destination("--svg", flags.svg.as_deref())?;
    if flags.exchange.codec.is_some() {
        let why = "bench ablate takes no --codec: its variants take gradients without conversion, so choose a --dtype";
        return Err(Usage(why.into()).into());
    }
    let (model, spec) = flags.exchange.spec()?;
    let variants = flags.variants(&spec)?;
    check_memory(&spec, 1)?;
    let variants =
        variants.into_iter().map(|variant| VariantRounds::new(variant, variant.of(&spec))).collect();
    let mut ablation = Ablation::new(model, flags.rounds, &flags.exchange, &spec, variants);
    println!("{}", ablation.headline());
    for round in 0..flags.rounds {
        for number in order(round, ablation.variants.len()) {
            let rounds = &mut ablation.variants[number];
            let program = Program {
                spec: rounds.spec.clone(),
                hosts: Hosts::here(),
                warmup: flags.exchange.warmup,
                iterations: flags.exchange.iters,
                label: format!("round {} of {}, {}", round + 1, flags.rounds, rounds.variant.name()),
            };
            match run(&program, &signals).with_context(|| rounds.variant.name())? {
                Run::Measured(measured) => rounds.add(&measured),
                Run::Interrupted(signal) => return Ok(interrupted(signal)),
            }
        }
    }
    println!("{}", ablation.table());
    if let Some(path) = &flags.exchange.json {
        write_json(&ablation.results(), path)?;
    }
    if let Some(path) = &flags.svg {
        ablation.plot().write(path)?;
    }
    for rounds in &ablation.variants {
        rounds.verdict.require_right().with_context(|| rounds.variant.name())?;
    }
    Ok(ExitCode::SUCCESS)
}

impl AblateFlags {
    /// The variants to measure, each once: the baseline first, then those that were asked for.
    fn variants(&self, exchange: &Spec) -> Result<Vec<Variant>, Usage> {
        let mut variants = vec![Variant::Normal];
        if self.variants.is_empty() {
            variants.extend(Variant::all(exchange));
        }
        for &variant in &self.variants {
            if let Some(obstacle) = variant.obstacle(exchange) {
                return Err(Usage(format!("{} cannot be measured here: {obstacle}", variant.name())));
            }
            if !variants.contains(&variant) {
                variants.push(variant);
            }
        }
        Ok(variants)
    }
}
