//! The command line of `cargo xtask testbed`.

use super::Task;
use super::delay::Delay;
use super::rate::Rate;
use super::shape::{NAME_DEFAULT, Shape, check_name};

pub(crate) const USAGE: &str = "\
Usage: cargo xtask testbed up --racks R --workers W --rate RATE [--hub-interfaces K] [--core-rate RATE]
                              [--congestion NAME] [--delay TIME] [--hold]
       cargo xtask testbed down | status | hosts | probe [--json FILE]
       cargo xtask testbed exec HOST -- COMMAND...
       cargo xtask testbed run SCENARIO [--json FILE] [--svg FILE] [-- OPTIONS OF bench/rack/run]

  --racks R, --workers W     racks, and workers in each: hosts r0w0, r0w1, .., r0hub, r1w0, ..
  --rate RATE                of each host's link, each way, as in 500mbit
  --hub-interfaces K         of each rack's hub (default: as many as workers)
  --core-rate RATE           between each rack and the core, each way (default: a rack's workers together)
  --congestion NAME          of all hosts' TCP, as in reno (default: as outside)
  --delay TIME               of every link, each way, as in 5ms (default: none)
  --hold                     stay until stdin ends, then take it down again
  --name NAME                with any of them: which testbed (default: phub)

Network namespaces are the hosts. It needs root; where namespaces are not permitted it ends with 3.
See docs/rack.md.
";

pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Task, String> {
    let action = arguments.next().ok_or("testbed: up, down, status, hosts, probe, exec or run?")?;
    if ["-h", "--help", "help"].contains(&action.as_str()) {
        return Ok(Task::Help);
    }
    if action == "up" {
        let mut rest: Vec<String> = arguments.collect();
        if rest.iter().any(|argument| ["-h", "--help"].contains(&argument.as_str())) {
            return Ok(Task::Help);
        }
        let before = rest.len();
        rest.retain(|argument| argument != "--hold");
        let task = if rest.len() < before { Task::Hold } else { Task::Up };
        return shape(rest.into_iter()).map(task);
    }
    let mut parsed = ParsedArguments::split(arguments)?;
    let name = parsed.name();
    check_name(&name)?;
    let json = parsed.take("--json");
    let mut positional = std::mem::take(&mut parsed.positional).into_iter();
    let task = match action.as_str() {
        "down" => Task::Down { name },
        "status" => Task::Status { name },
        "hosts" => Task::Hosts { name },
        "probe" => return parsed.finish(positional, Task::Probe { name, json }),
        "exec" => {
            let host = positional.next().ok_or("testbed exec: which host?")?;
            if parsed.command.is_empty() {
                return Err("testbed exec: give a command after `--`".into());
            }
            Task::Exec { name, host, command: std::mem::take(&mut parsed.command) }
        }
        "run" => {
            let scenario = positional.next().ok_or("testbed run: which scenario? See bench/rack/")?;
            let more = std::mem::take(&mut parsed.command);
            let svg = parsed.take("--svg");
            return parsed.finish(positional, Task::Run { name, scenario, json, svg, more });
        }
        other => return Err(format!("testbed has no action `{other}`")),
    };
    if json.is_some() {
        return Err(format!("testbed {action} writes no file"));
    }
    parsed.finish(positional, task)
}

/// Parses the flags of `up`.
pub(crate) fn shape(arguments: impl Iterator<Item = String>) -> Result<Shape, String> {
    let mut parsed = ParsedArguments::split(arguments)?;
    let name = parsed.name();
    let racks = parsed.number("--racks")?.ok_or("testbed up: how many --racks?")?;
    let workers = parsed.number("--workers")?.ok_or("testbed up: how many --workers a rack?")?;
    let rate = parsed.take("--rate").ok_or("testbed up: at what --rate are the links?")?;
    let mut shape = Shape::new(&name, racks, workers, Rate::parse(&rate)?);
    if let Some(interfaces) = parsed.number("--hub-interfaces")? {
        shape.hub_interfaces = interfaces;
    }
    if let Some(rate) = parsed.take("--core-rate") {
        shape.core_rate = Rate::parse(&rate)?;
    }
    shape.congestion = parsed.take("--congestion");
    if let Some(delay) = parsed.take("--delay") {
        shape.delay = Some(Delay::parse(&delay)?);
    }
    shape.check()?;
    let positional = std::mem::take(&mut parsed.positional).into_iter();
    parsed.finish(positional, shape)
}

/// The arguments by kind.
#[derive(Default)]
struct ParsedArguments {
    flags: Vec<(String, String)>,
    positional: Vec<String>,
    /// The arguments after `--`.
    command: Vec<String>,
}

impl ParsedArguments {
    fn split(mut arguments: impl Iterator<Item = String>) -> Result<ParsedArguments, String> {
        let mut parsed = ParsedArguments::default();
        while let Some(argument) = arguments.next() {
            if argument == "--" {
                parsed.command.extend(arguments);
                break;
            }
            if !argument.starts_with('-') {
                parsed.positional.push(argument);
                continue;
            }
            let (flag, attached) = match argument.split_once('=') {
                Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
                None => (argument, None),
            };
            let value = attached.or_else(|| arguments.next());
            parsed.flags.push((flag.clone(), value.ok_or(format!("{flag} needs a value"))?));
        }
        Ok(parsed)
    }

    fn name(&mut self) -> String {
        self.take("--name").unwrap_or_else(|| NAME_DEFAULT.to_owned())
    }

    fn take(&mut self, flag: &str) -> Option<String> {
        let found = self.flags.iter().position(|(name, _)| name == flag)?;
        Some(self.flags.remove(found).1)
    }

    fn number(&mut self, flag: &str) -> Result<Option<usize>, String> {
        let Some(text) = self.take(flag) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| format!("{flag} {text}: it must be a number"))
    }

    /// Refuses the arguments that are left over.
    fn finish<T>(self, mut positional: impl Iterator<Item = String>, task: T) -> Result<T, String> {
        let flag = self.flags.into_iter().map(|(flag, _)| flag).next();
        match flag.or(positional.next()).or(self.command.into_iter().next()) {
            Some(word) => Err(format!("testbed: unknown argument `{word}`")),
            None => Ok(task),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> Result<Task, String> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn up_has_defaults_that_its_flags_change() {
        let shape = Shape::new("phub", 2, 4, Rate(500_000_000));
        assert_eq!(parse_line("up --racks 2 --workers=4 --rate 500mbit"), Ok(Task::Up(shape.clone())));
        let changed = Shape { name: "b".into(), hub_interfaces: 1, core_rate: Rate(250_000_000), ..shape };
        let line = "up --core-rate 250mbit --racks 2 --name b --workers 4 --rate 500mbit --hub-interfaces 1";
        assert_eq!(parse_line(line), Ok(Task::Up(changed.clone())));
        assert_eq!(parse_line(&line.replace("--name", "--hold --name")), Ok(Task::Hold(changed)));
    }

    #[test]
    fn a_shape_is_shown_as_the_flags_that_make_it() {
        let Ok(Task::Up(shape)) =
            parse_line("up --racks 3 --workers 5 --rate 2500kbit --name x --congestion reno --delay 5ms")
        else {
            panic!("it is right")
        };
        assert_eq!(super::shape(shape.to_string().split(' ').map(str::to_owned)), Ok(shape));
    }

    #[test]
    fn a_command_is_taken_as_it_is() {
        let name = "phub".to_owned();
        let command = ["ls", "--name", "x", "--", "-h"].map(str::to_owned).to_vec();
        let task = Task::Exec { name, host: "r0w1".into(), command };
        assert_eq!(parse_line("exec r0w1 -- ls --name x -- -h"), Ok(task));
        let (name, scenario) = ("b".to_owned(), "rack.toml".to_owned());
        let (json, svg) = (Some("out".into()), Some("drawn".into()));
        let task = Task::Run { name, scenario, json, svg, more: vec!["--rounds".into(), "1".into()] };
        assert_eq!(parse_line("run --json out rack.toml --name b --svg drawn -- --rounds 1"), Ok(task));
    }

    #[test]
    fn wrong_arguments_are_refused_and_named() {
        for (line, named) in [
            ("", "up, down"),
            ("sideways", "`sideways`"),
            ("up --workers 2 --rate 1gbit", "--racks"),
            ("up --racks two --workers 2 --rate 1gbit", "--racks two"),
            ("up --racks 1 --workers 2 --rate 1", "`1`"),
            ("up --racks 1 --workers 2 --rate 1gbit --core-rate x", "`x`"),
            ("up --racks 1 --workers 2 --rate 1gbit --colour red", "`--colour`"),
            ("up --racks 1 --workers 2 --rate 1gbit now", "`now`"),
            ("up --racks 1 --workers 2 --rate", "--rate needs a value"),
            ("up --racks 1 --workers 2 --rate 1gbit --name a-b", "a-b"),
            ("up --racks 1 --workers 2 --rate 1gbit --congestion a;b", "a;b"),
            ("up --racks 1 --workers 2 --rate 1gbit --delay 5", "`5`"),
            ("down --name ../x", "../x"),
            ("down all", "`all`"),
            ("status --json x", "writes no file"),
            ("exec", "which host"),
            ("exec r0w0 ls", "after `--`"),
            ("run", "which scenario"),
        ] {
            let problem = parse_line(line).expect_err(line);
            assert!(problem.contains(named), "`{line}` was refused with: {problem}");
        }
    }

    #[test]
    fn help_is_given_wherever_it_is_asked_for() {
        assert_eq!(parse_line("--help"), Ok(Task::Help));
        assert_eq!(parse_line("up --racks 1 --help"), Ok(Task::Help));
    }
}
