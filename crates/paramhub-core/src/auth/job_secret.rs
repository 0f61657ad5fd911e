//! What a worker is given to join a job: the job's nonce, and how it recognises the connection manager.

use std::fmt;
use std::str::FromStr;

use super::{Fingerprint, Nonce, to_hex};

/// The secret of a job as launchers pass it to workers: the nonce, and the fingerprint of the authority of the
/// manager's certificate, where the manager speaks TLS. Written as `NONCE` or `NONCE.FINGERPRINT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobSecret {
    /// The job's nonce.
    pub nonce: Nonce,
    /// The authority whose certificates are the manager's; `None` if the manager is reached in clear.
    pub authority: Option<Fingerprint>,
}

impl From<Nonce> for JobSecret {
    fn from(nonce: Nonce) -> JobSecret {
        JobSecret { nonce, authority: None }
    }
}

impl From<JobSecret> for String {
    fn from(secret: JobSecret) -> String {
        let nonce = to_hex(&secret.nonce.0);
        match secret.authority {
            Some(authority) => format!("{nonce}.{authority}"),
            None => nonce,
        }
    }
}

impl FromStr for JobSecret {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (nonce, authority) = match text.split_once('.') {
            Some((nonce, authority)) => (nonce, Some(authority.parse()?)),
            None => (text, None),
        };
        Ok(JobSecret { nonce: nonce.parse()?, authority })
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_hex(&self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_a_nonce_with_or_without_a_fingerprint() {
        let nonce = Nonce([0xab; 32]);
        for authority in [None, Some(Fingerprint([0xcd; 32]))] {
            let secret = JobSecret { nonce, authority };
            assert_eq!(String::from(secret).parse::<JobSecret>(), Ok(secret));
        }
        let nonce = String::from(nonce);
        for wrong in
            [format!("{nonce}."), format!("{nonce}.ab"), format!(".{nonce}"), format!("{nonce}.{nonce}.")]
        {
            let refused = wrong.parse::<JobSecret>().unwrap_err();
            assert!(!refused.contains("abab"), "{refused}");
        }
    }
}
