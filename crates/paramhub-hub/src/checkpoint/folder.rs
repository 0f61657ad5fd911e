//! This module decides where checkpoints are stored, which of them count, and which are removed.
//!
//! `DIR/JOB/step-STEP.RUN/hub-N.json` is the manifest of hub N's part. RUN are the first digits of the job's
//! namespace: a job that resumes from an old checkpoint writes beside the checkpoints of the job before it,
//! never over them. A job that begins again because it has lost a hub adds the epoch with which it does, as in `RUN-3`: parts
//! from before must not become a whole with later ones.
//!
//! Which checkpoint is newer does not depend on the clock, which may be set back. Steps only grow within a
//! run. A run takes a generation that is higher than those of all runs that it finds, and writes it into its
//! manifests. The time of writing orders only runs of the same generation: those of old releases, which wrote
//! none.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use paramhub_core::auth::{Epoch, Namespace};
use paramhub_core::key::Key;

use super::manifest::Manifest;

/// The longest manifest that is read.
const MANIFEST_BYTES_MAX: u64 = 1 << 30;

/// The folder of one job's checkpoints.
#[derive(Clone, Debug)]
pub(crate) struct JobFolder {
    path: PathBuf,
    /// The epoch with which the job that writes here has begun.
    epoch: u64,
}

/// The contents of the folder of one run's step.
#[derive(Clone, Debug)]
pub struct FoundCheckpoint {
    /// Its folder.
    pub path: PathBuf,
    /// The step in its folder's name.
    pub step: u32,
    /// The parts whose manifests can be read.
    pub parts: Vec<Manifest>,
    /// The reason why it does not count, if it does not.
    pub flaw: Option<CheckpointFlaw>,
}

/// The reason why a checkpoint does not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckpointFlaw {
    /// Some parts are missing.
    Incomplete,
    /// The contents have changed since they were written.
    Damaged(String),
}

impl FoundCheckpoint {
    /// Returns the time at which its last part was written, in milliseconds since the Unix epoch; without
    /// parts, when anything was last written.
    pub fn written_ms(&self) -> u64 {
        let parts = self.parts.iter().map(|part| part.written_ms).max();
        let touched = || {
            let modified = fs::metadata(&self.path).and_then(|folder| folder.modified()).ok()?;
            u64::try_from(modified.duration_since(UNIX_EPOCH).ok()?.as_millis()).ok()
        };
        parts.or_else(touched).unwrap_or(0)
    }

    /// The generation of its run; 0 if it has no parts, or a release wrote it that had no generations.
    fn generation(&self) -> u64 {
        self.parts.iter().map(|part| part.generation).max().unwrap_or(0)
    }

    /// The name of its folder.
    pub(super) fn name(&self) -> &str {
        self.path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
    }

    /// The run that wrote it, from its folder's name.
    pub(super) fn run(&self) -> &str {
        self.start().split('-').next().unwrap_or_default()
    }

    /// The same with the epoch, if that run had begun again.
    fn start(&self) -> &str {
        self.name().split_once('.').map_or("", |(_, start)| start)
    }

    /// Bytes of all its parts.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(Manifest::bytes).sum()
    }

    /// A checkpoint of which only the name is known.
    pub(super) fn unreadable(path: PathBuf, step: u32, error: &io::Error) -> FoundCheckpoint {
        let flaw = Some(CheckpointFlaw::Damaged(format!("{} cannot be read: {error}", path.display())));
        FoundCheckpoint { path, step, parts: Vec::new(), flaw }
    }

    fn read(path: PathBuf, step: u32) -> io::Result<FoundCheckpoint> {
        let mut found = FoundCheckpoint { step, parts: Vec::new(), flaw: None, path };
        for entry in fs::read_dir(&found.path)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let damaged = |why: String| CheckpointFlaw::Damaged(format!("{}: {why}", path.display()));
            let text = match fs::metadata(&path) {
                // Another hub is removing it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Ok(file) if file.len() > MANIFEST_BYTES_MAX => Err("it is too long for a manifest".into()),
                _ => match fs::read_to_string(&path) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    text => text.map_err(|error| error.to_string()),
                },
            };
            match text.and_then(|text| Manifest::decode(&text)) {
                Ok(part) => found.parts.push(part),
                Err(why) => found.flaw = Some(damaged(why)),
            }
        }
        found.parts.sort_by_key(|part| part.hub);
        if found.flaw.is_none() {
            found.flaw = found.gap();
        }
        Ok(found)
    }

    /// Returns the reason why its parts do not make a whole, if they do not.
    fn gap(&self) -> Option<CheckpointFlaw> {
        let Some(first) = self.parts.first() else { return Some(CheckpointFlaw::Incomplete) };
        // A change of hyperparameters from the next step on may have come to one hub before its part was whole, and to
        // another after that.
        let is_like_first = |part: &Manifest| {
            part.namespace == first.namespace
                && part.step == self.step
                && part.keys == first.keys
                && part.optimizer == first.optimizer
                && part.state_slots == first.state_slots
        };
        if !self.parts.iter().all(is_like_first) {
            let path = self.path.display();
            return Some(CheckpointFlaw::Damaged(format!("the parts in {path} are not of one run and step")));
        }
        let mut ends: Vec<u64> = vec![0; first.keys.len()];
        let mut tensors: Vec<_> = self.parts.iter().flat_map(|part| &part.tensors).collect();
        tensors.sort_by_key(|tensor| (tensor.key, tensor.first));
        for tensor in tensors {
            let end = &mut ends[tensor.key as usize];
            if tensor.first > *end {
                return Some(CheckpointFlaw::Incomplete);
            }
            // Two parts have a chunk if a hub took it over at this step from one that had written it: both are of this step.
            *end = (*end).max(tensor.first + tensor.elements);
        }
        let is_whole = ends.iter().zip(first.keys.keys()).all(|(&end, key)| Key::elements(key) == Some(end));
        (!is_whole).then_some(CheckpointFlaw::Incomplete)
    }
}

impl JobFolder {
    /// The folder for a job of that name, in the operator's folder.
    pub(crate) fn new(folder: &Path, job: &str) -> JobFolder {
        // A name may have slashes and dots, but must not lead out of the folder.
        let mut name = job.replace('/', "%2F");
        if name.starts_with('.') {
            name.replace_range(..1, "%2E");
        }
        JobFolder::at(folder.join(name))
    }

    pub(crate) fn at(path: PathBuf) -> JobFolder {
        JobFolder { path, epoch: Epoch::FIRST }
    }

    /// The same folder for a job that begins with this epoch.
    pub(crate) fn in_epoch(self, epoch: u64) -> JobFolder {
        JobFolder { epoch, ..self }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of a run's part of a step.
    pub(crate) fn of_step(&self, step: u32, run: Namespace) -> PathBuf {
        self.path.join(format!("step-{step:010}.{}", self.start_of(run)))
    }

    fn start_of(&self, run: Namespace) -> String {
        let run = name_of_run(run);
        if self.epoch > Epoch::FIRST { format!("{run}-{}", self.epoch) } else { run }
    }

    /// A generation for a run: its own if it has written here since it has begun, otherwise one higher than those of all other
    /// runs.
    pub(super) fn next_generation(&self, run: Namespace) -> io::Result<u64> {
        let start = self.start_of(run);
        let least = |found: FoundCheckpoint| match found.start() == start {
            true => found.generation(),
            false => found.generation().saturating_add(1),
        };
        Ok(self.list()?.into_iter().map(least).max().unwrap_or(0).max(1))
    }

    /// All checkpoints in the folder, the newest first; none if there is no such folder. One that cannot be
    /// read is listed with its flaw and hides no other.
    pub(crate) fn list(&self) -> io::Result<Vec<FoundCheckpoint>> {
        let entries = match fs::read_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry?.path();
            let step = path.file_name().and_then(|name| step_of(name.to_str()?));
            let Some(step) = step else { continue };
            let read = match fs::metadata(&path) {
                // Hubs write no files with such a name.
                Ok(entry) if !entry.is_dir() => continue,
                Ok(_) => FoundCheckpoint::read(path.clone(), step),
                Err(error) => Err(error),
            };
            match read {
                Ok(read) => found.push(read),
                // Another hub has removed it first.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => found.push(FoundCheckpoint::unreadable(path, step, &error)),
            }
        }
        Ok(newest_first(found))
    }

    /// Creates the folder of a step, and makes sure that it still exists after a power cut.
    pub(crate) fn make(&self, step: &Path) -> io::Result<()> {
        fs::create_dir_all(step)?;
        sync_folder(&self.path)?;
        self.path.parent().map_or(Ok(()), sync_folder)
    }

    /// Keeps the newest `keep` complete checkpoints, and those that are newer than the oldest of these. Hubs
    /// may still write to some of the incomplete ones, but at most `keep` + 1 of them stay. The checkpoint
    /// that the run has just written, at `step`, stays in any case, and so do later ones that its other hubs
    /// have written.
    pub(crate) fn prune(&self, keep: usize, run: Namespace, step: u32) -> io::Result<()> {
        let (mut complete, mut others) = (0, 0);
        let (mut failed, start) = (None, self.start_of(run));
        for found in self.list()? {
            let goes = match &found.flaw {
                None => {
                    complete += 1;
                    complete > keep
                }
                // Either it is so old that later ones are complete, or no checkpoint of this job gets
                // completed.
                Some(CheckpointFlaw::Incomplete) => {
                    others += 1;
                    complete >= keep || others > keep + 1
                }
                Some(CheckpointFlaw::Damaged(_)) => complete >= keep,
            };
            let is_new = found.start() == start && found.step >= step;
            if goes && !is_new {
                // A checkpoint that cannot be removed must not keep the others from it.
                failed = failed.or(remove(&found.path).err());
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

/// The digits of a run in names of folders.
pub(super) fn name_of_run(run: Namespace) -> String {
    run.to_string().chars().filter(char::is_ascii_hexdigit).take(12).collect()
}

/// The runs by generation, then by the time when they last wrote; within a run by step.
fn newest_first(found: Vec<FoundCheckpoint>) -> Vec<FoundCheckpoint> {
    let mut runs: HashMap<&str, (u64, u64)> = HashMap::new();
    for one in &found {
        let (generation, written_ms) = runs.entry(one.start()).or_default();
        *generation = one.generation().max(*generation);
        *written_ms = one.written_ms().max(*written_ms);
    }
    let order: Vec<_> =
        found.iter().map(|one| (runs[one.start()], one.start().to_owned(), one.step)).collect();
    let mut found: Vec<_> = order.into_iter().zip(found).collect();
    found.sort_by(|(one, _), (other, _)| other.cmp(one));
    found.into_iter().map(|(_, found)| found).collect()
}

/// Removes manifests first: a checkpoint that is half removed must not look whole. Another hub may remove it at the same time.
fn remove(step: &Path) -> io::Result<()> {
    let gone = |result: io::Result<()>| match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    };
    let remove_manifests = || {
        for entry in fs::read_dir(step)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                gone(fs::remove_file(path))?;
            }
        }
        sync_folder(step)
    };
    gone(remove_manifests())?;
    gone(fs::remove_dir_all(step))
}

fn step_of(name: &str) -> Option<u32> {
    name.strip_prefix("step-")?.split_once('.')?.0.parse().ok()
}

/// Writes a small file so that it is there whole or not at all.
pub(super) fn write_whole(path: &Path, contents: &str) -> io::Result<()> {
    let temporary = temporary_of(path);
    let mut file = File::create(&temporary)?;
    file.write_all(contents.as_bytes())?;
    file.sync_all()?;
    settle(&temporary, path)
}

/// The name of a file until it is whole.
pub(super) fn temporary_of(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    path.with_file_name(name)
}

/// Gives a file that is whole and synced its name, durably.
pub(super) fn settle(temporary: &Path, path: &Path) -> io::Result<()> {
    fs::rename(temporary, path)?;
    path.parent().map_or(Ok(()), sync_folder)
}

pub(super) fn sync_folder(path: &Path) -> io::Result<()> {
    let path = if path == Path::new("") { Path::new(".") } else { path };
    File::open(path)?.sync_all()
}

/// The jobs with checkpoints in an operator's folder, by the names of their folders.
pub(super) fn jobs(folder: &Path) -> io::Result<BTreeMap<String, JobFolder>> {
    let mut jobs = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            let name = entry.file_name().to_string_lossy().replace("%2F", "/").replace("%2E", ".");
            jobs.insert(name, JobFolder::at(entry.path()));
        }
    }
    Ok(jobs)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::manifest::tests::manifest;
    use super::*;

    pub(crate) fn put(folder: &JobFolder, step: u32, run: u8, change: impl FnOnce(&mut Manifest)) -> PathBuf {
        let mut part = manifest();
        (part.step, part.namespace) = (step, Namespace([run; 16]));
        (part.generation, part.written_ms) = (0, u64::from(run) * 1000 + u64::from(step));
        part.files.clear();
        change(&mut part);
        let path = folder.of_step(step, part.namespace);
        folder.make(&path).unwrap();
        write_whole(&path.join(format!("hub-{}.json", part.hub)), &part.encode()).unwrap();
        path
    }

    #[test]
    fn parts_are_whole_although_one_hub_knew_of_the_next_change_of_hyperparameters() {
        let (scratch, half) = (tempfile::tempdir().unwrap(), |part: &mut Manifest, hub: u32| {
            part.hub = hub;
            part.tensors.retain(|tensor| tensor.key % 2 == hub);
        });
        let folder = JobFolder::new(scratch.path(), "job");
        put(&folder, 20, 1, |part| half(part, 0));
        put(&folder, 20, 1, |part| {
            half(part, 1);
            part.hyperparameters[0].learning_rate /= 2.0;
        });
        let [found] = &folder.list().unwrap()[..] else { panic!("one checkpoint") };
        assert_eq!((found.parts.len(), &found.flaw), (2, &None));
    }

    #[test]
    fn a_run_that_begins_again_writes_beside_its_former_parts_and_is_newer() {
        let scratch = tempfile::tempdir().unwrap();
        let run = Namespace([1; 16]);
        let first = JobFolder::new(scratch.path(), "job");
        let generation = first.next_generation(run).unwrap();
        put(&first, 20, 1, |part| part.generation = generation);
        let again = first.clone().in_epoch(3);
        assert_ne!(first.of_step(20, run), again.of_step(20, run));
        let generation = again.next_generation(run).unwrap();
        assert_eq!(generation, 2, "steps of before were made again");
        put(&again, 10, 1, |part| part.generation = generation);
        let found = again.list().unwrap();
        assert_eq!(
            found.iter().map(|one| (one.step, one.run())).collect::<Vec<_>>(),
            [(10, name_of_run(run).as_str()), (20, name_of_run(run).as_str())]
        );
        assert_eq!(again.newest_of(run).unwrap().unwrap().step, 10);
        again.prune(1, run, 10).unwrap();
        assert_eq!(again.list().unwrap().len(), 1, "the one from before is older");
    }

    #[test]
    fn names_lead_nowhere_else() {
        let folder = |job| JobFolder::new(Path::new("/data"), job).path;
        assert_eq!(folder("a/b"), Path::new("/data/a%2Fb"));
        assert_eq!(folder(".."), Path::new("/data/%2E."));
        assert_eq!(folder("../../etc"), Path::new("/data/%2E.%2F..%2Fetc"));
        assert_eq!(folder("run-1"), Path::new("/data/run-1"));
    }

    #[test]
    fn parts_of_one_run_that_cover_every_element_are_a_checkpoint() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = JobFolder::new(scratch.path(), "job");
        assert!(folder.list().unwrap().is_empty());
        let half = |first: u64, hub: u32| {
            move |part: &mut Manifest| {
                part.hub = hub;
                let tensor = &mut part.tensors[0];
                (tensor.first, tensor.elements, tensor.updates) = (first, 5, vec![(5, 12, 12)]);
            }
        };
        put(&folder, 5, 1, half(0, 0));
        let flaw = || folder.list().unwrap()[0].flaw.clone();
        assert_eq!(flaw(), Some(CheckpointFlaw::Incomplete));
        put(&folder, 5, 1, half(5, 1));
        assert_eq!(flaw(), None);
        put(&folder, 5, 1, half(5, 2));
        assert_eq!(flaw(), None, "a hub has taken over what another had written");
        put(&folder, 5, 1, |part| {
            half(4, 2)(part);
            part.tensors[0].elements = 6;
            part.tensors[0].updates = vec![(6, 12, 12)];
        });
        assert_eq!(flaw(), None, "and has more besides");
        put(&folder, 5, 1, |part| {
            half(5, 2)(part);
            part.state_slots = 7;
        });
        assert!(matches!(flaw(), Some(CheckpointFlaw::Damaged(why)) if why.contains("one run")));
        // An older run's checkpoint of the same step is separate.
        put(&folder, 5, 2, half(0, 0));
        assert_eq!(folder.list().unwrap().len(), 2);
    }

    #[test]
    fn new_checkpoints_outlast_a_clock_that_was_set_back() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = JobFolder::new(scratch.path(), "job");
        let (old, new) = (Namespace([9; 16]), Namespace([2; 16]));
        let day_ms = 86_400_000;
        let steps = |folder: &JobFolder| -> Vec<u32> {
            folder.list().unwrap().iter().map(|found| found.step).collect()
        };
        // A run of a release without generations and one after it, both before the clock went back by a day.
        put(&folder, 60_000, 7, |part| (part.generation, part.written_ms) = (0, 3 * day_ms));
        let generation = folder.next_generation(old).unwrap();
        for step in [50_000, 51_000] {
            put(&folder, step, 9, |part| (part.generation, part.written_ms) = (generation, 3 * day_ms + 1));
            folder.prune(2, old, step).unwrap();
        }
        assert_eq!(steps(&folder), [51_000, 50_000]);
        // The next run resumes from an earlier step; its clock is behind, and goes back once more.
        let generation = folder.next_generation(new).unwrap();
        for step in 1..=4 {
            let written_ms = 2 * day_ms - u64::from(step) * 1000;
            let path = put(&folder, 50_000 + step, 2, |part| {
                (part.generation, part.written_ms) = (generation, written_ms);
            });
            folder.prune(2, new, 50_000 + step).unwrap();
            assert!(path.exists(), "what was just written, of step {step}");
            assert_eq!(folder.next_generation(new).unwrap(), generation, "a run keeps its generation");
        }
        assert_eq!(steps(&folder), [50_004, 50_003]);
    }

    #[test]
    fn the_newest_checkpoint_is_kept_beside_those_of_a_run_with_a_higher_generation() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = JobFolder::new(scratch.path(), "job");
        for step in 100..104 {
            put(&folder, step, 9, |part| part.generation = u64::MAX);
        }
        let path = put(&folder, 7, 1, |part| part.generation = 1);
        folder.prune(2, Namespace([1; 16]), 7).unwrap();
        let left: Vec<u32> = folder.list().unwrap().iter().map(|found| found.step).collect();
        assert_eq!(left, [103, 102, 7]);
        assert!(path.exists());
    }

    #[test]
    fn an_entry_that_cannot_be_read_hides_no_other() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = JobFolder::new(scratch.path(), "job");
        for step in [100, 200, 300] {
            put(&folder, step, 1, |_| {});
        }
        // No user can read a link that leads to itself. Hubs never write a file with such a name.
        let unreadable = folder.of_step(250, Namespace([1; 16]));
        std::os::unix::fs::symlink(&unreadable, &unreadable).unwrap();
        fs::write(folder.path.join("step-0000000400.notes"), "").unwrap();
        let found = folder.list().unwrap();
        assert_eq!(found.iter().map(|found| found.step).collect::<Vec<_>>(), [300, 250, 200, 100]);
        assert!(
            matches!(&found[1].flaw, Some(CheckpointFlaw::Damaged(why)) if why.contains("cannot be read"))
        );
        // Nor does it keep old checkpoints, although it cannot be removed itself.
        folder.prune(1, Namespace([1; 16]), 300).unwrap_err();
        let left: Vec<u32> = folder.list().unwrap().iter().map(|found| found.step).collect();
        assert_eq!(left, [300, 250]);
    }

    #[test]
    fn checkpoints_without_a_generation_are_kept_by_the_time_of_writing() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = JobFolder::new(scratch.path(), "job");
        for step in [100, 200, 300] {
            put(&folder, step, 1, |_| {});
        }
        // A run that went back to 100, and a part that is never completed.
        put(&folder, 150, 2, |_| {});
        put(&folder, 160, 2, |part| {
            let tensor = &mut part.tensors[0];
            (tensor.elements, tensor.updates) = (5, vec![(5, 12, 12)]);
        });
        let foreign = folder.path.join("notes");
        fs::create_dir(&foreign).unwrap();
        let nothing = folder.of_step(90, Namespace([1; 16]));
        fs::create_dir(&nothing).unwrap();
        File::open(&nothing).unwrap().set_modified(UNIX_EPOCH).unwrap();
        let begun = folder.of_step(400, Namespace([2; 16]));
        fs::create_dir(&begun).unwrap();
        folder.prune(2, Namespace([2; 16]), 160).unwrap();
        let left: Vec<u32> = folder.list().unwrap().iter().map(|found| found.step).collect();
        assert_eq!(left, [400, 160, 150, 300]);
        assert!(foreign.exists() && !nothing.exists());
    }
}
