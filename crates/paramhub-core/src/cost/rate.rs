//! Rates of links, and their text.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The rate of a link in one direction, in bits per second: finite and above zero. Written as `500mbit` or
/// `25Gbit`.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Rate(f64);

/// The reason why a rate cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{text}` is no rate: {problem}")]
pub struct RateError {
    text: String,
    problem: &'static str,
}

const UNITS: [(&str, f64); 5] = [("bit", 1.0), ("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9), ("tbit", 1e12)];

impl Rate {
    /// A rate of this many bits per second; `None` unless finite and above zero.
    pub fn from_bits_per_second(bits: f64) -> Option<Rate> {
        (bits.is_finite() && bits > 0.0).then_some(Rate(bits))
    }

    /// Bits per second, in one direction.
    pub fn bits_per_second(self) -> f64 {
        self.0
    }

    /// Seconds that `bytes` take, in one direction.
    pub fn seconds(self, bytes: f64) -> f64 {
        bytes * 8.0 / self.0
    }

    /// The rate of this many equal links together.
    pub fn times(self, links: u32) -> Rate {
        Rate(self.0 * f64::from(links.max(1)))
    }
}

impl FromStr for Rate {
    type Err = RateError;

    fn from_str(text: &str) -> Result<Rate, RateError> {
        let refuse = |problem| RateError { text: text.to_owned(), problem };
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let unit = unit.trim_start().to_ascii_lowercase();
        let unit = unit.strip_suffix("/s").unwrap_or(&unit);
        if unit.ends_with("bps") {
            // `bps` means bytes to `tc` and bits to most people.
            return Err(refuse("bps means bits to some and bytes to others: write kbit, mbit or gbit"));
        }
        let Some((_, factor)) = UNITS.iter().find(|(name, _)| *name == unit) else {
            return Err(refuse("write a number and bit, kbit, mbit, gbit or tbit, as in 500mbit or 25gbit"));
        };
        let number: f64 = number.parse().map_err(|_| refuse("it begins with no number"))?;
        Rate::from_bits_per_second(number * factor).ok_or_else(|| refuse("it must be above zero, and finite"))
    }
}

impl TryFrom<String> for Rate {
    type Error = RateError;

    fn try_from(text: String) -> Result<Rate, RateError> {
        text.parse()
    }
}

impl From<Rate> for String {
    fn from(rate: Rate) -> String {
        format!("{}bit", rate.0)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, factor) = match self.0 {
            bits if bits >= 1e9 => ("Gbit/s", 1e9),
            bits if bits >= 1e6 => ("Mbit/s", 1e6),
            bits if bits >= 1e3 => ("kbit/s", 1e3),
            _ => ("bit/s", 1.0),
        };
        // Three digits are as precise as a measurement; trailing zeros would claim more.
        let number = format!("{:.2}", self.0 / factor);
        write!(f, "{} {unit}", number.trim_end_matches('0').trim_end_matches('.'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_as_people_write_them() {
        for (text, bits) in [
            ("500mbit", 5e8),
            ("10gbit", 1e10),
            ("25Gbit", 2.5e10),
            ("2.5 Gbit/s", 2.5e9),
            (" 64kbit ", 64e3),
            ("1e3bit", f64::NAN),
            ("9600bit", 9600.0),
        ] {
            match text.parse::<Rate>() {
                Ok(rate) => assert_eq!(rate.bits_per_second(), bits, "{text}"),
                Err(error) => assert!(bits.is_nan(), "{error}"),
            }
        }
    }

    #[test]
    fn a_text_that_is_no_rate_is_refused_with_a_reason() {
        for (text, reason) in [
            ("10", "write a number and bit"),
            ("10gb", "write a number and bit"),
            ("10Gbps", "bits to some and bytes to others"),
            ("gbit", "begins with no number"),
            ("1.2.3gbit", "begins with no number"),
            ("0mbit", "above zero"),
            ("-1mbit", "write a number and bit"),
            ("", "write a number and bit"),
        ] {
            let refused = text.parse::<Rate>().unwrap_err().to_string();
            assert!(refused.contains(reason) && refused.contains(&format!("`{text}`")), "{refused}");
        }
    }

    #[test]
    fn a_rate_survives_being_written() {
        for bits in [1.0, 9600.0, 5e8, 2.5e10, 123_456_789.0, 4.77e8] {
            let rate = Rate::from_bits_per_second(bits).unwrap();
            assert_eq!(String::from(rate).parse::<Rate>().unwrap(), rate);
        }
        assert_eq!(Rate(5e8).to_string(), "500 Mbit/s");
        assert_eq!(Rate(2.5e10).to_string(), "25 Gbit/s");
        assert_eq!(Rate(4.77e8).to_string(), "477 Mbit/s");
        assert_eq!(Rate(12_345_678.0).to_string(), "12.35 Mbit/s");
    }
}
