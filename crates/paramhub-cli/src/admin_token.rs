//! The admin token, given as text or in a file. A file is not shown by `ps`, nor inherited by every child.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Once;

use crate::config::Secret;

const TOKEN_VARIABLE: &str = "PARAMHUB_ADMIN_TOKEN";
const FILE_VARIABLE: &str = "PARAMHUB_ADMIN_TOKEN_FILE";
/// The most bytes of such a file: more than any token has.
const FILE_BYTES_MAX: u64 = 8192;

/// Where the token is found. Empty text stands for no token.
#[derive(Clone, Debug, Default)]
pub(crate) struct TokenSource {
    pub(crate) token: Option<Secret>,
    pub(crate) file: Option<PathBuf>,
}

impl TokenSource {
    /// Reads the token; `None` if there is none.
    ///
    /// # Errors
    /// If it is given twice, or the file cannot be used.
    pub(crate) fn read(self) -> Result<Option<Secret>, String> {
        let token = self.token.filter(|token| !token.0.is_empty());
        match (token, self.file.filter(|file| !file.as_os_str().is_empty())) {
            (Some(_), Some(file)) => Err(format!(
                "the admin token is given twice: as text, and in {}. Give one of them (--admin-token or {TOKEN_VARIABLE}, or \
                 --admin-token-file or {FILE_VARIABLE})",
                file.display()
            )),
            (token, None) => Ok(token),
            (None, Some(file)) => read_file(&file).map(Some),
        }
    }
}

/// The admin token in `PARAMHUB_ADMIN_TOKEN`, or in the file that `PARAMHUB_ADMIN_TOKEN_FILE` names.
///
/// # Errors
/// If both are set, or the file cannot be used.
pub fn admin_token_from_environment() -> Result<Option<String>, String> {
    let text = |name| std::env::var(name).ok();
    let token = text(TOKEN_VARIABLE).map(|token| Secret(token.trim().to_owned()));
    let file = std::env::var_os(FILE_VARIABLE).map(PathBuf::from);
    Ok(TokenSource { token, file }.read()?.map(|token| token.0))
}

fn read_file(path: &Path) -> Result<Secret, String> {
    let refused = |why: String| format!("the admin token cannot be read from {}: {why}", path.display());
    let file = File::open(path).map_err(|error| refused(error.to_string()))?;
    let about = file.metadata().map_err(|error| refused(error.to_string()))?;
    let mut text = String::new();
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(|error| refused(error.to_string()))?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(refused(format!("it has more than {FILE_BYTES_MAX} bytes")));
    }
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let (Some(token), None) = (lines.next(), lines.next()) else {
        return Err(refused("it must have one line, the token, as from `openssl rand -hex 32`".into()));
    };
    if about.is_file() && about.permissions().mode() & 0o077 != 0 {
        // The Python package reads the token several times.
        static WARNED: Once = Once::new();
        WARNED.call_once(|| {
            eprintln!(
                "paramhub: other users may read the admin token in {}: `chmod 600` keeps it from them",
                path.display()
            );
        });
    }
    Ok(Secret(token.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_file(contents: &[u8]) -> Result<Option<Secret>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), contents).unwrap();
        TokenSource { token: None, file: Some(file.path().into()) }.read()
    }

    #[test]
    fn a_file_has_the_token_in_its_only_line() {
        for contents in ["secret", "secret\n", "\n  secret \n\n"] {
            assert_eq!(of_file(contents.as_bytes()).unwrap(), Some(Secret("secret".into())));
        }
        for (contents, why) in [
            (&b""[..], "one line"),
            (b"a\nb\n", "one line"),
            (b"\xff", "UTF-8"),
            (&[b'a'; 10_000], "more than 8192 bytes"),
        ] {
            let refused = of_file(contents).unwrap_err();
            assert!(refused.contains(why) && !refused.contains("aaa"), "{refused}");
        }
        let missing = TokenSource { token: None, file: Some("/no/such/file".into()) }.read().unwrap_err();
        assert!(missing.contains("/no/such/file: No such file"), "{missing}");
    }

    #[test]
    fn a_token_is_given_once_or_not_at_all() {
        let token = |text: &str| Some(Secret(text.into()));
        let read = |token, file: &str| TokenSource { token, file: Some(file.into()) }.read();
        assert_eq!(read(None, ""), Ok(None));
        assert_eq!(read(token(""), ""), Ok(None));
        assert_eq!(read(token("secret"), ""), Ok(token("secret")));
        let twice = read(token("secret"), "/some/file").unwrap_err();
        assert!(twice.contains("given twice") && !twice.contains("secret"), "{twice}");
    }
}
