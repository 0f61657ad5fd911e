//! This is the one table of features that exclude one another, or have no effect together.
//!
//! A caller (a worker, a hub, the connection manager, the command line, the Python package) collects the
//! [`Features`] that it knows to be asked for, and [`check`] finds the first [`Rule`] that refuses two of
//! them. The [`Conflict`] is the message for people. Bounds of a single number are checked where it is read.
//!
//! docs/combinations.md is printed from the table.

mod asked;
mod feature;
mod rules;
#[cfg(test)]
mod tests;

use std::fmt;

use thiserror::Error;

pub use asked::{check_job, features_of_reduction};
pub use feature::{Feature, Features};
pub use rules::TOPICS;

/// Rules about one subject.
#[derive(Debug)]
pub struct Topic {
    /// The subject, as a heading.
    pub title: &'static str,
    /// The rules.
    pub rules: &'static [Rule],
}

/// A line of the table: each of `these` excludes each of `those`.
#[derive(Debug, PartialEq, Eq)]
pub struct Rule {
    /// The features that are asked for.
    pub these: &'static [Feature],
    /// The features that exclude them.
    pub those: &'static [Feature],
    /// The kind of the conflict.
    pub verdict: Verdict,
    /// The reason why the two do not combine: a clause, which no other rule has.
    pub why: &'static str,
    /// The remedy, as a request.
    pub remedy: &'static str,
    /// The callers that ask the table about this rule.
    pub callers: &'static [Caller],
}

/// The kind of a conflict between two features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The results would be wrong, or the two contradict each other.
    Refused,
    /// The first would change nothing.
    NoEffect,
}

/// A caller that asks the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Every rank, the manager and the hubs, about a job's settings.
    Settings,
    /// The manager at CreateService, about a job's options.
    CreateService,
    /// The manager once all ranks are there, about its hubs.
    ConnectService,
    /// The manager and the hubs at InitService, about a job as a whole.
    InitService,
    /// A worker, about its own options.
    Worker,
    /// The ranks that exchange factors.
    FactorExchange,
    /// A key-value store that is made.
    Store,
    /// A hub's process that starts.
    Hub,
    /// The command line.
    CommandLine,
    /// The Python package.
    Python,
}

impl Caller {
    /// The name for people.
    pub const fn name(self) -> &'static str {
        match self {
            Caller::Settings => "settings",
            Caller::CreateService => "CreateService",
            Caller::ConnectService => "ConnectService",
            Caller::InitService => "InitService",
            Caller::Worker => "worker",
            Caller::FactorExchange => "factor exchange",
            Caller::Store => "key-value store",
            Caller::Hub => "hub",
            Caller::CommandLine => "command line",
            Caller::Python => "Python",
        }
    }

    /// The rules that this caller asks about.
    pub fn rules(self) -> impl Iterator<Item = &'static Rule> {
        rules().filter(move |rule| rule.callers.contains(&self))
    }
}

/// All rules, in the order of precedence.
pub fn rules() -> impl Iterator<Item = &'static Rule> {
    TOPICS.iter().flat_map(|topic| topic.rules)
}

/// Two features that were asked for together and do not combine. The text says what they are, why they do
/// not combine, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{}{this} {} {other}: {}; {}", SubjectPrefix(subject), rule.verdict, rule.why, rule.remedy)]
pub struct Conflict {
    /// The rule that refuses them.
    pub rule: &'static Rule,
    /// The one of [`Rule::these`].
    pub this: Feature,
    /// The one of [`Rule::those`].
    pub other: Feature,
    /// The key or the layer that asks for one of them, if it is not the whole job.
    pub subject: Option<Box<str>>,
}

impl Conflict {
    /// The conflict with the key or the layer that it is about, which begins the message.
    #[must_use]
    pub fn about(self, subject: impl fmt::Display) -> Conflict {
        Conflict { subject: Some(subject.to_string().into()), ..self }
    }

    /// Returns whether `feature` is one of the two.
    pub fn involves(&self, feature: Feature) -> bool {
        self.this == feature || self.other == feature
    }

    /// The feature that does not combine with `feature`, which is one of the two.
    pub fn other_than(&self, feature: Feature) -> Feature {
        if self.this == feature { self.other } else { self.this }
    }
}

/// The beginning of a message about a part of a job.
struct SubjectPrefix<'a>(&'a Option<Box<str>>);

impl fmt::Display for SubjectPrefix<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |subject| write!(f, "{subject}: "))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Refused => "cannot be combined with",
            Verdict::NoEffect => "would have no effect with",
        })
    }
}

impl Rule {
    /// The first pair of features that the rule refuses.
    fn conflict(&'static self, asked: Features) -> Option<Conflict> {
        let first = |features: &[Feature]| features.iter().copied().find(|&feature| asked.has(feature));
        let (this, other) = (first(self.these)?, first(self.those)?);
        Some(Conflict { rule: self, this, other, subject: None })
    }
}

/// Refuses features that do not combine.
///
/// # Errors
/// The first conflict, in the order of the table.
pub fn check(asked: Features) -> Result<(), Conflict> {
    rules().find_map(|rule| rule.conflict(asked)).map_or(Ok(()), Err)
}

/// The first conflict of `feature` with one of `others`.
pub fn conflict_of(feature: Feature, others: Features) -> Option<Conflict> {
    let asked = others.with(feature);
    rules().filter_map(|rule| rule.conflict(asked)).find(|conflict| conflict.involves(feature))
}

/// Returns the reason why two features do not combine.
///
/// # Panics
/// If no rule refuses them.
pub(crate) fn reason(this: Feature, other: Feature) -> &'static str {
    conflict_of(this, Features::NONE.with(other)).expect("the table has a rule for these two").rule.why
}
