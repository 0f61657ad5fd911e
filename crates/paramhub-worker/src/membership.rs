//! The manager, job and rank with which a worker joins.

use paramhub_core::auth::{JobSecret, Namespace};
use paramhub_core::service::ServiceCreated;

use crate::error::WorkerError;

/// The information that a worker needs to join a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The connection manager, as `https://host:port`, `http://host:port`, `host:port` or `host`.
    pub url: String,
    /// The job's namespace, from the answer to CreateService.
    pub namespace: Namespace,
    /// The job's secret, from the answer to CreateService: the nonce, and how to recognise the manager.
    pub secret: JobSecret,
    /// This worker's rank, from 0.
    pub rank: u32,
}

impl Membership {
    /// The membership of `rank` in a job that was just created at the manager at `url`.
    pub fn of_job(url: impl Into<String>, job: &ServiceCreated, rank: u32) -> Self {
        Membership { url: url.into(), namespace: job.namespace, secret: job.secret(), rank }
    }

    /// Reads `PARAMHUB_URL`, `PARAMHUB_JOB` (the namespace), `PARAMHUB_SECRET` and `RANK`, which
    /// `paramhub run` sets.
    ///
    /// # Errors
    /// [`WorkerError::Environment`] names the first variable that is missing or cannot be read.
    pub fn from_env() -> Result<Self, WorkerError> {
        Self::from_variables(|variable| std::env::var_os(variable).map(|value| value.into_string()))
    }

    fn from_variables(
        read: impl Fn(&'static str) -> Option<Result<String, std::ffi::OsString>>,
    ) -> Result<Self, WorkerError> {
        let required = |variable, expected| match read(variable) {
            Some(Ok(value)) if !value.trim().is_empty() => Ok(value.trim().to_owned()),
            Some(Ok(_)) => Err(wrong(variable, "is empty", expected)),
            Some(Err(_)) => Err(wrong(variable, "is not UTF-8", expected)),
            None => Err(wrong(variable, "is not set", expected)),
        };
        let url = required("PARAMHUB_URL", "the connection manager's URL, as in http://127.0.0.1:7770")?;
        let expected = "the namespace that CreateService answered";
        let namespace: Namespace = required("PARAMHUB_JOB", expected)?
            .parse()
            .map_err(|problem: String| unreadable("PARAMHUB_JOB", &problem, expected))?;
        let expected = "the job's secret, as `paramhub jobs create` prints it";
        // The problem never repeats the value.
        let secret: JobSecret = required("PARAMHUB_SECRET", expected)?
            .parse()
            .map_err(|problem: String| unreadable("PARAMHUB_SECRET", &problem, expected))?;
        let expected = "this worker's rank, from 0";
        let rank = required("RANK", expected)?
            .parse()
            .map_err(|problem: std::num::ParseIntError| unreadable("RANK", &problem.to_string(), expected))?;
        Ok(Membership { url, namespace, secret, rank })
    }
}

fn wrong(variable: &'static str, problem: &str, expected: &'static str) -> WorkerError {
    WorkerError::Environment { variable, problem: problem.into(), expected }
}

fn unreadable(variable: &'static str, problem: &str, expected: &'static str) -> WorkerError {
    wrong(variable, &format!("cannot be read ({problem})"), expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn read(changed: &'static str, to: Option<&str>) -> Result<Membership, WorkerError> {
        Membership::from_variables(|variable| {
            if variable == changed {
                return to.map(|value| Ok(value.to_owned()));
            }
            let value = match variable {
                "PARAMHUB_URL" => "http://127.0.0.1:7770",
                "PARAMHUB_JOB" => "00112233445566778899aabbccddeeff",
                "PARAMHUB_SECRET" => SECRET,
                "RANK" => " 3 ",
                other => panic!("{other} has no business here"),
            };
            Some(Ok(value.to_owned()))
        })
    }

    #[test]
    fn the_environment_says_where_and_as_whom() {
        let membership = read("", None).unwrap();
        assert_eq!((membership.rank, membership.url.as_str()), (3, "http://127.0.0.1:7770"));
        assert_eq!(membership.namespace.to_string(), "00112233445566778899aabbccddeeff");
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        for variable in ["PARAMHUB_URL", "PARAMHUB_JOB", "PARAMHUB_SECRET", "RANK"] {
            let missing = read(variable, None).unwrap_err().to_string();
            assert!(missing.starts_with(&format!("{variable} is not set")), "{missing}");
            assert!(missing.contains("paramhub run"), "{missing}");
            let empty = read(variable, Some(" ")).unwrap_err().to_string();
            assert!(empty.starts_with(&format!("{variable} is empty")), "{empty}");
        }
        assert!(read("RANK", Some("-1")).unwrap_err().to_string().contains("invalid digit"));
        assert!(read("PARAMHUB_JOB", Some("zz")).unwrap_err().to_string().contains("32 hexadecimal"));
    }

    #[test]
    fn a_broken_secret_is_not_repeated() {
        let refused = read("PARAMHUB_SECRET", Some(&SECRET[1..])).unwrap_err();
        assert!(!format!("{refused} {refused:?}").contains(&SECRET[1..]), "{refused}");
    }
}
