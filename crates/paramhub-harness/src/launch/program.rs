use std::ffi::OsString;
use std::process::Command;
use std::sync::OnceLock;

/// The program with the arguments that lead to its command line: a fact about the process, like its
/// environment.
static THIS_PROGRAM: OnceLock<Vec<OsString>> = OnceLock::new();

/// Sets how the running program is started when its file alone does not do it: under Python,
/// `python -m paramhub`. Only the first call counts.
pub fn started_as(command: Vec<OsString>) {
    assert!(!command.is_empty(), "a command has a program");
    let _ = THIS_PROGRAM.set(command);
}

/// A command that starts the running program once more. The caller adds the arguments of the command line.
pub fn this_program() -> std::io::Result<Command> {
    let Some((program, arguments)) = THIS_PROGRAM.get().and_then(|command| command.split_first()) else {
        return Ok(Command::new(std::env::current_exe()?));
    };
    let mut command = Command::new(program);
    command.args(arguments);
    Ok(command)
}
