//! Reads the parts of an old checkpoint that a new job gets.

use std::fs;
use std::path::Path;

use paramhub_core::auth::Namespace;
use paramhub_core::checkpoint::Resume;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::limits::STATE_UPDATES_MAX;

use super::folder::{CheckpointFlaw, FoundCheckpoint, JobFolder};
use super::manifest::{Manifest, TensorContents, TensorEntry};
use super::run_record::NextStart;
use super::tensors::{self, Shape};
use super::write::{quantised, shape_of, state_shapes};
use crate::core::{Restored, ShardPlan};

/// With what the shards of a hub begin.
#[derive(Debug)]
pub(crate) enum Loaded {
    Checkpoint {
        step: u32,
        /// The name of its folder.
        name: String,
        /// The state of each shard, in the order of the plans.
        shards: Vec<Restored>,
    },
    /// Rank 0's parameters, for this reason.
    Anew(String),
}

/// With which checkpoint a job begins.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Start {
    /// One that was asked for.
    From(Resume),
    /// The newest that this run has written, since a hub was lost. Before the first it is the one that was asked for.
    Again { run: Namespace, from: Option<Resume> },
}

/// Reads the requested checkpoint.
///
/// # Errors
/// Why it cannot be used, and which earlier one can.
pub(crate) fn load(folder: &JobFolder, start: Start, plans: &[ShardPlan]) -> Result<Loaded, String> {
    match start {
        Start::From(which) => load_asked(folder, which, plans),
        Start::Again { run, from } => {
            let path = folder.path().display();
            let own = folder.newest_of(run).map_err(|error| format!("{path} cannot be read: {error}"))?;
            let loaded = match (own, from) {
                (Some(found), _) => load_one(&found, plans).map_err(|why| {
                    let (step, path) = (found.step, found.path.display());
                    format!("its checkpoint of step {step} in {path} cannot be used: {why}")
                })?,
                (None, Some(which)) => load_asked(folder, which, plans)?,
                (None, None) => Loaded::Anew(String::new()),
            };
            match loaded {
                // The ranks have made steps already, and cannot begin anew.
                Loaded::Anew(_) => {
                    Err(format!("a hub was lost before its first checkpoint was whole in {path}"))
                }
                loaded => Ok(loaded),
            }
        }
    }
}

fn load_asked(folder: &JobFolder, which: Resume, plans: &[ShardPlan]) -> Result<Loaded, String> {
    if which == Resume::Auto {
        return match folder.next_start()? {
            NextStart::Anew(why) => Ok(Loaded::Anew(why)),
            NextStart::Checkpoint(found) => load_one(&found, plans).map_err(|why| {
                let (step, path) = (found.step, found.path.display());
                format!(
                    "its last run has not finished, and its checkpoint of step {step} in {path} cannot be used: {why}. Choose \
                     an earlier one with --resume=STEP, or begin anew with --resume=never"
                )
            }),
        };
    }
    let path = folder.path().display();
    let found = folder.list().map_err(|error| format!("{path} cannot be read: {error}"))?;
    let mut candidates = found.iter().filter(|found| found.flaw != Some(CheckpointFlaw::Incomplete));
    let asked = candidates.find(|found| which == Resume::Latest || which == Resume::Step(found.step));
    let Some(asked) = asked else {
        let what = match which {
            Resume::Latest | Resume::Auto => "no complete checkpoint".to_string(),
            Resume::Step(step) => format!("no complete checkpoint of step {step}"),
        };
        return Err(format!("there is {what} in {path}: begin without --resume, or put one there"));
    };
    load_one(asked, plans).map_err(|why| {
        let usable = candidates
            .find(|found| found.flaw.is_none() && fits(found, plans).is_ok() && found.verify().is_ok());
        let instead = match usable {
            Some(before) => {
                format!("the one before it, of step {0}, can be used: resume with {0}", before.step)
            }
            None => "there is none before it that can be used".into(),
        };
        format!(
            "the checkpoint of step {} in {} cannot be used: {why}; {instead}",
            asked.step,
            asked.path.display()
        )
    })
}

fn load_one(found: &FoundCheckpoint, plans: &[ShardPlan]) -> Result<Loaded, String> {
    if let Some(CheckpointFlaw::Damaged(why)) = &found.flaw {
        return Err(why.clone());
    }
    fits(found, plans)?;
    let about = &found.parts[0];
    let mut shards = Vec::with_capacity(plans.len());
    for plan in plans {
        let room = Restored::room(plan, about.step, about.hyperparameters.clone());
        shards.push(room.ok_or("the operating system has no memory left to read it")?);
    }
    let place = Place::new(plans);
    for tensor in found.parts.iter().flat_map(|part| &part.tensors) {
        let mut first = tensor.first;
        for &(elements, _, updates) in &tensor.updates {
            place.each(tensor.key, first, elements, |shard, slot, _, _, _| {
                shards[shard].put_updates(slot, updates)
            });
            first += elements;
        }
    }
    read(found, |tensor, holds, slot, at, values| {
        let (first, elements) = (tensor.first + at, values.len() as u64);
        place.each(tensor.key, first, elements, |shard, index, within, from, to| {
            let values = &values[from..to];
            match holds {
                TensorContents::Parameters => shards[shard].put_parameters(index, within, values),
                TensorContents::State => shards[shard].put_state(index, slot, within, values),
                TensorContents::Received => shards[shard].put_received(index, within, values),
            }
        });
    })?;
    restore_program_states(found, plans, &mut shards)?;
    Ok(Loaded::Checkpoint { step: about.step, name: found.name().to_owned(), shards })
}

/// Reads all files of all parts, and returns an error where the contents have changed. `take` gets the
/// tensor, its kind, the state's slot, the position of the first value in the tensor, and the values.
pub(super) fn read(
    found: &FoundCheckpoint,
    mut take: impl FnMut(&TensorEntry, TensorContents, usize, u64, &[f32]),
) -> Result<(), String> {
    match &found.flaw {
        Some(CheckpointFlaw::Damaged(why)) => return Err(why.clone()),
        Some(CheckpointFlaw::Incomplete) => return Err("not all of its parts were written".into()),
        None => {}
    }
    for part in &found.parts {
        let holds: Vec<TensorContents> = part.files.iter().map(|file| file.holds).collect();
        let mut expected = vec![TensorContents::Parameters];
        expected.extend((part.state_slots > 0).then_some(TensorContents::State));
        let quantised: Vec<(usize, Shape)> = quantised(&part.tensors, part).collect();
        expected.extend((!quantised.is_empty()).then_some(TensorContents::Received));
        if holds != expected {
            return Err(format!("hub {} wrote other files than this release reads", part.hub));
        }
        for file in &part.files {
            let tensor_of = |number: usize| match file.holds {
                TensorContents::Parameters => (number, 0),
                TensorContents::State => (number / part.state_slots, number % part.state_slots),
                TensorContents::Received => (quantised[number].0, 0),
            };
            let shapes = match file.holds {
                TensorContents::Parameters => {
                    part.tensors.iter().map(|tensor| (tensor.name.clone(), shape_of(tensor, part))).collect()
                }
                TensorContents::State => state_shapes(&part.tensors, part.state_slots, part),
                TensorContents::Received => quantised.iter().map(|(_, shape)| shape.clone()).collect(),
            };
            let path: &Path = &found.path.join(&file.name);
            tensors::read(path, &shapes, file.bytes, &file.blake3, |number, at, values| {
                let (tensor, slot) = tensor_of(number);
                take(&part.tensors[tensor], file.holds, slot, at, values);
            })
            .map_err(|why| format!("{} {why}", path.display()))?;
        }
    }
    Ok(())
}

/// Hands the program states to the shard that keeps them. In a job with another number of ranks each rank has another part
/// of the data, and begins with the state that its program has.
fn restore_program_states(
    found: &FoundCheckpoint,
    plans: &[ShardPlan],
    shards: &mut [Restored],
) -> Result<(), String> {
    let keeper = plans.iter().position(|plan| plan.program_state_bytes_here() > 0);
    let Some(keeper) = keeper.filter(|&number| found.parts[0].workers == plans[number].ports.workers())
    else {
        return Ok(());
    };
    shards[keeper].program_states = read_program_states(found)?;
    Ok(())
}

/// Reads the program states of all parts, with their ranks, or returns an error where the contents have changed.
pub(super) fn read_program_states(found: &FoundCheckpoint) -> Result<Vec<(u32, Vec<u8>)>, String> {
    let mut states = Vec::new();
    for part in found.parts.iter().filter(|part| !part.program_states.is_empty()) {
        let path = found.path.join(part.program_states_name());
        let damaged = |why: &str| format!("{} {why}", path.display());
        let file = fs::read(&path).map_err(|error| damaged(&format!("cannot be read: {error}")))?;
        let mut rest = &file[..];
        for entry in &part.program_states {
            let state = usize::try_from(entry.bytes).ok().and_then(|bytes| rest.split_at_checked(bytes));
            let (state, behind) = state.ok_or_else(|| damaged("is torn: it is shorter than it was"))?;
            if blake3::hash(state).to_hex().as_str() != entry.blake3 {
                return Err(damaged("is damaged: its contents have changed"));
            }
            states.push((entry.rank, state.to_vec()));
            rest = behind;
        }
    }
    Ok(states)
}

/// Checks that a checkpoint fits this job.
fn fits(found: &FoundCheckpoint, plans: &[ShardPlan]) -> Result<(), String> {
    let (Some(about), Some(plan)) = (found.parts.first(), plans.first()) else { return Ok(()) };
    let settings = &plan.settings;
    if let Some((index, theirs, mine)) = at_rest(&about.keys).first_difference(&at_rest(&settings.keys)) {
        let side = |key: Option<&Key>| key.map_or("no such key".to_string(), ToString::to_string);
        return Err(format!(
            "it is of another key table: key {index} is {} there, {} in this job",
            side(theirs),
            side(mine)
        ));
    }
    let differs =
        |what: &str, theirs: String, mine: String| Err(format!("it has {what} {theirs}, this job {mine}"));
    let slots = plan.groups.iter().map(|group| plan.optimizer.state_slots(group)).max().unwrap_or(0);
    if about.optimizer != settings.optimizer.name {
        return differs("the optimizer", about.optimizer.clone(), settings.optimizer.name.clone());
    }
    if about.hyperparameters.len() != plan.groups.len() {
        let (theirs, mine) = (about.hyperparameters.len(), plan.groups.len());
        return differs("groups of hyperparameters, in number", theirs.to_string(), mine.to_string());
    }
    if about.state_slots != slots {
        return differs(
            "values of optimizer state a parameter:",
            about.state_slots.to_string(),
            slots.to_string(),
        );
    }
    for hyperparameters in &about.hyperparameters {
        plan.optimizer.check(hyperparameters).map_err(|error| error.to_string())?;
    }
    let all = found.parts.iter().flat_map(|part: &Manifest| &part.tensors).flat_map(|tensor| &tensor.updates);
    match all.map(|(.., updates)| *updates).max() {
        Some(updates) if updates > STATE_UPDATES_MAX => {
            Err(format!("its state has had {updates} updates, which none has"))
        }
        _ => Ok(()),
    }
}

/// The table with neutral order and codecs, on which the checkpoint's contents do not depend.
fn at_rest(keys: &KeyTable) -> KeyTable {
    let keys = keys.keys().iter().map(|key| Key { priority: 0, codec: None, ..key.clone() });
    KeyTable::new(keys.collect()).expect("it was one with priorities and codecs")
}

/// The places of keys' elements in a hub's shards.
struct Place<'a> {
    plans: &'a [ShardPlan],
    /// The number of the plan of each route of the site.
    plan_of: Vec<Option<usize>>,
}

impl Place<'_> {
    fn new(plans: &[ShardPlan]) -> Place<'_> {
        let routes = plans.first().map_or(0, |plan| plan.placement().routes().len());
        let mut plan_of = vec![None; routes];
        for (number, plan) in plans.iter().enumerate() {
            plan_of[usize::from(plan.route)] = Some(number);
        }
        Place { plans, plan_of }
    }

    /// Calls `each` for every chunk here that has some of the `elements` elements of a key from `first` on,
    /// with the plan's number, the slot, the position in the chunk, and the range of these elements among
    /// those asked for.
    fn each(
        &self,
        key: u32,
        first: u64,
        elements: u64,
        mut each: impl FnMut(usize, u32, usize, usize, usize),
    ) {
        let Some(plan) = self.plans.first() else { return };
        let size = u64::from(plan.map.chunk_elements());
        let (mut at, end) = (first, first + elements);
        while at < end {
            let chunk = plan.map.chunks_of(key).start + (at / size) as u32;
            let to = end.min((at / size + 1) * size);
            let (route, slot) = plan.placement().locate(chunk).expect("every chunk is placed");
            if let Some(number) = self.plan_of[usize::from(route)] {
                each(number, slot, (at % size) as usize, (at - first) as usize, (to - first) as usize);
            }
            at = to;
        }
    }
}
