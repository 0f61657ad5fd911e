//! The record of the run that has begun last in a job's folder, by which a later run of the same name goes on by
//! itself.
//!
//! `DIR/JOB/run.json` names the run, the checkpoint with which it began, and the step at which it finished, if it
//! has. Its hubs write it before the job's first checkpoint, all of them the same, and once more when all workers have left.
//! Checkpoints alone would not do: those of a run that finished, of one that was begun anew on purpose, and of one
//! that was cut off look alike. Without a record, as in the folders of older releases, nothing goes on by itself.

use std::fs;
use std::io;
use std::path::PathBuf;

use paramhub_core::auth::Namespace;
use serde::{Deserialize, Serialize};

use super::folder::{CheckpointFlaw, FoundCheckpoint, JobFolder, name_of_run, settle, sync_folder};

/// The longest record that is read.
const RECORD_BYTES_MAX: u64 = 1 << 16;

/// What the caller may do where the next start cannot be known.
pub(super) const CHOOSE: &str =
    "Choose: --resume, for the newest checkpoint of all, or --resume=never, to begin anew";

/// A run of a job, as its folder knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RunRecord {
    /// The first digits of its namespace, as in the names of its checkpoints.
    run: String,
    /// The name of the folder of the checkpoint with which it began.
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<String>,
    /// The step at which all workers had left.
    #[serde(skip_serializing_if = "Option::is_none")]
    finished_step: Option<u32>,
}

/// With what the next run of a job begins that goes on by itself.
#[derive(Clone, Debug)]
pub enum NextStart {
    /// The newest complete checkpoint of the last run, which has not finished.
    Checkpoint(FoundCheckpoint),
    /// Nothing that is here, for this reason.
    Anew(String),
}

impl JobFolder {
    /// Finds the checkpoint from which the next run goes on by itself.
    ///
    /// # Errors
    /// Why that cannot be known.
    pub(crate) fn next_start(&self) -> Result<NextStart, String> {
        let path = self.record_path();
        let unreadable = |error: io::Error| format!("{} cannot be read: {error}. {CHOOSE}", path.display());
        let Some(record) = self.read_record().map_err(unreadable)? else {
            return Ok(NextStart::Anew("no run of this name has left a record".into()));
        };
        if let Some(step) = record.finished_step {
            return Ok(NextStart::Anew(format!("its last run finished at step {step}")));
        }
        let found =
            self.list().map_err(|error| format!("{} cannot be read: {error}", self.path().display()))?;
        let mut candidates = found.into_iter().filter(|found| found.flaw != Some(CheckpointFlaw::Incomplete));
        let is_first = |found: &FoundCheckpoint| record.from.as_deref() == Some(found.name());
        let (mut own, mut first) = (None, None);
        for found in candidates.by_ref() {
            match found.run() == record.run {
                true => own = own.or(Some(found)),
                false if is_first(&found) => first = Some(found),
                false => {}
            }
        }
        match (own.or(first), record.from) {
            (Some(found), _) => Ok(NextStart::Checkpoint(found)),
            (None, None) => Ok(NextStart::Anew("its last run has left no complete checkpoint".into())),
            (None, Some(from)) => Err(format!(
                "its last run has left no complete checkpoint, and {from}, with which it began, is not in {} any more. {CHOOSE}",
                self.path().display()
            )),
        }
    }

    /// Finds the newest complete checkpoint that this run has written.
    pub(super) fn newest_of(&self, run: Namespace) -> io::Result<Option<FoundCheckpoint>> {
        let run = name_of_run(run);
        let is_it =
            |found: &FoundCheckpoint| found.run() == run && found.flaw != Some(CheckpointFlaw::Incomplete);
        Ok(self.list()?.into_iter().find(is_it))
    }

    /// Records that a run begins, from this checkpoint if from any. `hub` is the number of the hub that writes it.
    pub(super) fn note_begin(&self, run: Namespace, from: Option<&str>, hub: u32) -> io::Result<()> {
        self.make(self.path())?;
        let record =
            RunRecord { run: name_of_run(run), from: from.map(ToOwned::to_owned), finished_step: None };
        self.write_record(&record, hub)
    }

    /// Records that a run has finished at a step, unless another has begun since.
    pub(super) fn note_finish(&self, run: Namespace, step: u32, hub: u32) -> io::Result<()> {
        match self.read_record()? {
            Some(record) if record.run != name_of_run(run) => Ok(()),
            // Each hub knows the newest step of its own chunks.
            Some(RunRecord { finished_step: Some(noted), .. }) if noted >= step => Ok(()),
            record => {
                let from = record.and_then(|record| record.from);
                self.write_record(&RunRecord { run: name_of_run(run), from, finished_step: Some(step) }, hub)
            }
        }
    }

    fn record_path(&self) -> PathBuf {
        self.path().join("run.json")
    }

    fn read_record(&self) -> io::Result<Option<RunRecord>> {
        let path = self.record_path();
        let text = match fs::metadata(&path) {
            Ok(file) if file.len() > RECORD_BYTES_MAX => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "it is too long"))
            }
            Ok(_) => fs::read_to_string(&path),
            Err(error) => Err(error),
        };
        match text {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            text => Ok(Some(serde_json::from_str(&text?)?)),
        }
    }

    /// Writes the record whole or not at all. Several hubs may do so at once, each by a file of its own.
    fn write_record(&self, record: &RunRecord, hub: u32) -> io::Result<()> {
        let temporary = self.path().join(format!("run.json.hub-{hub}.tmp"));
        let mut file = fs::File::create(&temporary)?;
        io::Write::write_all(&mut file, &serde_json::to_vec(record)?)?;
        file.sync_all()?;
        settle(&temporary, &self.record_path())?;
        sync_folder(self.path())
    }
}

#[cfg(test)]
mod tests {
    use super::super::folder::tests::put;
    use super::*;

    const RUN: fn(u8) -> Namespace = |number| Namespace([number; 16]);

    fn folder() -> (tempfile::TempDir, JobFolder) {
        let scratch = tempfile::tempdir().unwrap();
        let folder = JobFolder::new(scratch.path(), "job");
        (scratch, folder)
    }

    fn checkpoint(folder: &JobFolder) -> (u32, String) {
        match folder.next_start().unwrap() {
            NextStart::Checkpoint(found) => (found.step, found.run().to_owned()),
            NextStart::Anew(why) => panic!("it begins anew: {why}"),
        }
    }

    fn anew(folder: &JobFolder) -> String {
        match folder.next_start().unwrap() {
            NextStart::Checkpoint(found) => panic!("it goes on from {found:?}"),
            NextStart::Anew(why) => why,
        }
    }

    #[test]
    fn a_run_that_was_cut_off_is_gone_on_with_and_one_that_finished_is_not() {
        let (_scratch, folder) = folder();
        assert!(anew(&folder).contains("no run"), "the folder is empty");
        put(&folder, 90, 9, |_| {});
        assert!(anew(&folder).contains("no run"), "a run of an older release may have finished");
        folder.note_begin(RUN(1), None, 0).unwrap();
        assert!(anew(&folder).contains("no complete checkpoint"), "run 9 was not gone on with");
        put(&folder, 10, 1, |part| part.generation = 1);
        put(&folder, 20, 1, |part| part.generation = 1);
        assert_eq!(checkpoint(&folder), (20, name_of_run(RUN(1))));
        folder.note_finish(RUN(1), 25, 0).unwrap();
        assert_eq!(anew(&folder), "its last run finished at step 25");
        // Another hub of the run is a little later.
        folder.note_finish(RUN(1), 24, 1).unwrap();
        assert_eq!(anew(&folder), "its last run finished at step 25");
    }

    #[test]
    fn a_run_without_a_checkpoint_of_its_own_is_begun_where_it_began() {
        let (_scratch, folder) = folder();
        folder.note_begin(RUN(1), None, 0).unwrap();
        let [first, _] = [10, 20].map(|step| put(&folder, step, 1, |part| part.generation = 1));
        let first = first.file_name().unwrap().to_str().unwrap();
        // A run that was to begin at an earlier checkpoint was cut off before it had one of its own.
        folder.note_begin(RUN(2), Some(first), 0).unwrap();
        assert_eq!(checkpoint(&folder), (10, name_of_run(RUN(1))));
        put(&folder, 15, 2, |part| part.generation = 2);
        assert_eq!(checkpoint(&folder), (15, name_of_run(RUN(2))));
        // A run that began anew does not go on with what was there before.
        folder.note_begin(RUN(3), None, 0).unwrap();
        assert!(anew(&folder).contains("no complete checkpoint"));
        folder.note_begin(RUN(4), Some("step-0000000001.gone"), 0).unwrap();
        let refused = folder.next_start().unwrap_err();
        assert!(refused.contains("step-0000000001.gone") && refused.contains("--resume=never"), "{refused}");
    }

    #[test]
    fn a_run_that_ends_late_does_not_end_the_one_after_it() {
        let (_scratch, folder) = folder();
        folder.note_begin(RUN(1), None, 0).unwrap();
        folder.note_begin(RUN(2), None, 0).unwrap();
        put(&folder, 5, 2, |part| part.generation = 2);
        folder.note_finish(RUN(1), 9, 0).unwrap();
        assert_eq!(checkpoint(&folder).0, 5);
    }

    #[test]
    fn a_record_that_cannot_be_read_decides_nothing() {
        let (_scratch, folder) = folder();
        folder.note_begin(RUN(1), None, 0).unwrap();
        fs::write(folder.record_path(), "{\"run\":").unwrap();
        let refused = folder.next_start().unwrap_err();
        assert!(
            refused.contains("run.json cannot be read") && refused.contains("--resume=never"),
            "{refused}"
        );
        fs::write(folder.record_path(), vec![b' '; RECORD_BYTES_MAX as usize + 1]).unwrap();
        assert!(folder.next_start().unwrap_err().contains("too long"));
    }
}
