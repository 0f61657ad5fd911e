use std::fmt;
use std::str::FromStr;

/// The rate of an interface in one direction, in Mbit/s; at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(u32);

/// Far above any existing link, and far below where sums of weights would matter.
const MBIT_MAX: u32 = 100_000_000;

impl Rate {
    /// A rate of this many Mbit/s, if that is between 1 and 100,000,000.
    pub fn from_mbit(mbit: u32) -> Option<Rate> {
        (1..=MBIT_MAX).contains(&mbit).then_some(Rate(mbit))
    }

    /// The rate in Mbit/s.
    pub fn mbit(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            mbit if mbit >= 1000 => write!(f, "{}gbit", f64::from(mbit) / 1000.0),
            mbit => write!(f, "{mbit}mbit"),
        }
    }
}

impl FromStr for Rate {
    type Err = String;

    /// Reads a rate as `tc` writes it, in units of bits: `10gbit`, `2.5gbit`, `500mbit`.
    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || {
            format!("`{text}` is no rate: expected one from 1mbit to 100000gbit, as in 500mbit or 2.5gbit")
        };
        let lower = text.trim().to_ascii_lowercase();
        let (number, mbit) = match (lower.strip_suffix("gbit"), lower.strip_suffix("mbit")) {
            (Some(number), _) => (number, 1000.0),
            (_, Some(number)) => (number, 1.0),
            _ => return Err(refuse()),
        };
        let number: f64 = number.trim().parse().map_err(|_| refuse())?;
        let mbit = (number * mbit).round();
        // NaN fails every comparison.
        match mbit >= 1.0 && mbit <= f64::from(MBIT_MAX) {
            true => Rate::from_mbit(mbit as u32).ok_or_else(refuse),
            false => Err(refuse()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_survive_text() {
        for (text, mbit, shown) in [
            ("10gbit", 10_000, "10gbit"),
            ("2.5Gbit", 2_500, "2.5gbit"),
            (" 500 mbit ", 500, "500mbit"),
            ("1000mbit", 1_000, "1gbit"),
            ("0.001gbit", 1, "1mbit"),
        ] {
            let rate: Rate = text.parse().unwrap();
            assert_eq!((rate.mbit(), rate.to_string().as_str()), (mbit, shown), "{text}");
            assert_eq!(rate.to_string().parse(), Ok(rate));
        }
        for text in ["", "gbit", "10", "10GB", "-1mbit", "0mbit", "nanmbit", "infgbit", "100001gbit"] {
            assert!(text.parse::<Rate>().unwrap_err().contains("is no rate"), "{text}");
        }
    }
}
