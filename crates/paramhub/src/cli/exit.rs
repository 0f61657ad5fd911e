/// How a command ended, for the shell. `std`'s own cannot be read, and whoever runs the command line within a program of
/// another language must tell that program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitCode(pub u8);

impl ExitCode {
    /// All went well.
    pub const SUCCESS: ExitCode = ExitCode(0);
    /// It did not.
    pub const FAILURE: ExitCode = ExitCode(1);
}

impl From<u8> for ExitCode {
    fn from(code: u8) -> Self {
        ExitCode(code)
    }
}

impl From<ExitCode> for std::process::ExitCode {
    fn from(code: ExitCode) -> Self {
        std::process::ExitCode::from(code.0)
    }
}
