//! Namespaces, interfaces and queues of the system, through iproute2.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::Problem;

/// The time that killed processes may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs a program to its end. If it fails, the error is its output on stderr.
pub(super) fn call(program: &str, arguments: &[&str], input: &str) -> Result<String, String> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cannot start {program}: {error}"))?;
    let written = child.stdin.take().expect("it is piped").write_all(input.as_bytes());
    let output = child.wait_with_output().map_err(|error| format!("{program}: {error}"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let words = stderr.trim().lines().collect::<Vec<_>>().join("; ");
        return Err(format!("`{program} {}`: {words}", arguments.join(" ")));
    }
    written.map_err(|error| format!("{program}: {error}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs commands of `ip` or `tc`, one a line, inside a namespace.
pub(super) fn batch(program: &str, namespace: &str, lines: &[String]) -> Result<(), Problem> {
    match lines.is_empty() {
        true => Ok(()),
        false => {
            call(program, &["-n", namespace, "-batch", "-"], &lines.join("\n")).map(drop).map_err(|error| {
                let lines = lines.join("; ");
                Problem::Failed(format!("{error} (of: {lines})"))
            })
        }
    }
}

/// All namespaces whose names begin with `prefix`.
pub(super) fn namespaces(prefix: &str) -> Result<Vec<String>, Problem> {
    let listed = call("ip", &["netns", "list"], "").map_err(Problem::Failed)?;
    let names = listed.lines().filter_map(|line| line.split_whitespace().next());
    Ok(names.filter(|name| name.starts_with(prefix)).map(str::to_owned).collect())
}

/// Every process in a namespace, whichever process started it.
pub(super) fn processes(namespace: &str) -> Result<Vec<String>, Problem> {
    let listed = call("ip", &["netns", "pids", namespace], "").map_err(Problem::Failed)?;
    Ok(listed.split_whitespace().map(str::to_owned).collect())
}

/// Ends all processes in these namespaces, then removes them: one with a process inside would live on without a name.
pub(super) fn remove(namespaces: &[String]) -> Result<(), Problem> {
    let deadline = Instant::now() + END_TIMEOUT;
    loop {
        let mut left = Vec::new();
        for namespace in namespaces {
            left.extend(processes(namespace)?);
        }
        if left.is_empty() {
            break;
        }
        if Instant::now() > deadline {
            return Err(Problem::Failed(format!("processes {} do not end", left.join(", "))));
        }
        // A process that has ended meanwhile makes `kill` fail; the next look finds that out.
        let _ = Command::new("kill").arg("-KILL").args(&left).stderr(Stdio::null()).status();
        std::thread::sleep(Duration::from_millis(20));
    }
    let lines: Vec<String> = namespaces.iter().map(|name| format!("netns delete {name}")).collect();
    call("ip", &["-batch", "-"], &lines.join("\n")).map(drop).map_err(Problem::Failed)
}
