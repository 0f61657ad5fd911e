//! Faults of the program itself, which the simulator must find.

/// A fault of the program itself, to show that the simulator finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    /// A contribution that came before is added again.
    RepeatCounted,
    /// A sum that a site has sent before is added again.
    SumCountedAgain,
    /// A hub does not send sums again that the site above has not answered, when their stream was replaced.
    SumsNotSentAgain,
    /// A hub that has a standby does not send it the sums, and goes on as if it had.
    StandbyNotTold,
    /// A hub reports that its new standby has all chunks as soon as it has begun to send the last.
    CopiedTooSoon,
    /// A standby takes over as soon as it has lost the hub which it follows, without the manager's word.
    TakesOverAlone,
    /// A hub has left a site above as soon as it has sent its Leave.
    LeavesUnheard,
    /// An older stream displaces a newer one.
    StaleStream,
    /// A second stream of a rank is admitted beside the first.
    RankTwice,
    /// A hub does not know that a stream was replaced.
    NoResume,
    /// A hub takes a worker whose stream was cut for lost at once.
    CutsLose,
    /// The manager answers before its store has saved what it tells.
    AnswersUnsaved,
    /// A manager that restarts has lost which process has which rank.
    HoldersForgotten,
    /// The manager sends a command once, and not until the hub has acknowledged it.
    CommandsOnce,
    /// A manager that restarts does not ask hubs for their jobs.
    JobsNotAsked,
    /// A hub lets a process that takes a rank join at the step that each core has named itself.
    JoinsAtOwnStep,
    /// Each core goes back to the step that it has named itself.
    RewindsToOwnStep,
    /// What was contributed before a job went back stays in the sums.
    SumsKept,
    /// After a job has gone back, hubs wait for as many workers as it can have.
    AllWorkersAwaited,
}
