//! The rate of a link.

use std::fmt;

const UNITS: [(&str, u64); 3] = [("gbit", 1_000_000_000), ("mbit", 1_000_000), ("kbit", 1_000)];

/// A rate in bits a second, written as tc does: 250mbit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rate(pub(crate) u64);

impl Rate {
    pub(crate) fn parse(text: &str) -> Result<Rate, String> {
        let wrong = || format!("`{text}` is no rate: give one such as 500mbit, from 1mbit to 100gbit");
        let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?);
        let bits = UNITS.iter().find(|(name, _)| *name == unit).and_then(|(_, bits)| {
            let number: u64 = number.parse().ok()?;
            number.checked_mul(*bits)
        });
        bits.filter(|bits| (1_000_000..=100_000_000_000).contains(bits)).map(Rate).ok_or_else(wrong)
    }

    pub(crate) fn bytes_per_second(self) -> f64 {
        self.0 as f64 / 8.0
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, bits) =
            UNITS.iter().find(|(_, bits)| self.0.is_multiple_of(*bits)).expect("whole kilobits");
        write!(f, "{}{name}", self.0 / bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_and_shown_as_tc_does() {
        for (text, bits) in [("500mbit", 500_000_000), ("1gbit", 1_000_000_000), ("2500kbit", 2_500_000)] {
            assert_eq!(Rate::parse(text), Ok(Rate(bits)));
            assert_eq!(Rate(bits).to_string(), text);
        }
        assert_eq!(Rate::parse("1000mbit").unwrap().to_string(), "1gbit");
    }

    #[test]
    fn a_text_that_is_no_rate_is_refused_by_name() {
        for text in ["", "500", "mbit", "5mb", "0mbit", "999kbit", "101gbit", "1.5gbit", "99999999999999gbit"]
        {
            let problem = Rate::parse(text).expect_err(text);
            assert!(problem.contains(&format!("`{text}`")), "{problem}");
        }
    }
}
