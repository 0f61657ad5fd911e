//! The command that starts the running program once more, for its child processes.

use std::ffi::OsString;
use std::process::Command;
use std::sync::OnceLock;

/// The program with the arguments that come before those of its command line. It is static because it is the same for
/// the whole process, like the environment.
static THIS_PROGRAM: OnceLock<Vec<OsString>> = OnceLock::new();

/// Sets the command that starts the running program, if the program's file alone does not start it: under Python it is
/// `python -m paramhub`. Only the first call counts.
pub fn set_this_program_command(command: Vec<OsString>) {
    assert!(!command.is_empty(), "a command has a program");
    let _ = THIS_PROGRAM.set(command);
}

/// A command that starts the running program once more. The caller adds the arguments of the command line.
pub fn this_program_command() -> std::io::Result<Command> {
    let Some((program, arguments)) = THIS_PROGRAM.get().and_then(|command| command.split_first()) else {
        return Ok(Command::new(std::env::current_exe()?));
    };
    let mut command = Command::new(program);
    command.args(arguments);
    Ok(command)
}
