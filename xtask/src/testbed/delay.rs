//! The delay of a link.

use std::fmt;
use std::time::Duration;

/// Longest unit first.
const UNITS: [(&str, u64); 3] = [("s", 1_000_000), ("ms", 1_000), ("us", 1)];

/// The time that a packet takes over a link, written as tc does: 5ms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Delay {
    microseconds: u64,
}

impl Delay {
    pub(crate) fn parse(text: &str) -> Result<Delay, String> {
        let wrong = || format!("`{text}` is no delay: give one such as 5ms, from 100us to 1s");
        let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?);
        let microseconds = UNITS.iter().find(|(name, _)| *name == unit).and_then(|(_, microseconds)| {
            let number: u64 = number.parse().ok()?;
            number.checked_mul(*microseconds)
        });
        let allowed = microseconds.filter(|number| (100..=1_000_000).contains(number));
        allowed.map(|microseconds| Delay { microseconds }).ok_or_else(wrong)
    }

    pub(crate) fn as_duration(self) -> Duration {
        Duration::from_micros(self.microseconds)
    }
}

impl fmt::Display for Delay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, microseconds) =
            UNITS.iter().find(|(_, unit)| self.microseconds.is_multiple_of(*unit)).expect("1 divides all");
        write!(f, "{}{name}", self.microseconds / microseconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_are_read_and_shown_as_tc_does() {
        for (text, microseconds) in [("5ms", 5_000), ("250us", 250), ("1s", 1_000_000), ("1500us", 1_500)] {
            let delay = Delay::parse(text).unwrap();
            assert_eq!(delay.as_duration(), Duration::from_micros(microseconds));
            assert_eq!(delay.to_string(), text);
        }
        assert_eq!(Delay::parse("1000us").unwrap().to_string(), "1ms");
    }

    #[test]
    fn a_text_that_is_no_delay_is_refused_by_name() {
        for text in ["", "5", "ms", "5m", "0ms", "99us", "1001ms", "1.5ms", "99999999999999999s"] {
            let problem = Delay::parse(text).expect_err(text);
            assert!(problem.contains(&format!("`{text}`")), "{problem}");
        }
    }
}
