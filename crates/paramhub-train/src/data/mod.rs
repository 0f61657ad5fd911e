//! Data sets: their sources, their batches, and which worker trains on which example.

mod cifar10;
mod dataset;
mod error;
mod idx;
mod order;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

pub use dataset::{Dataset, Geometry};
pub use error::DataError;
pub use order::EpochOrder;

/// A data set by name, as given to `--data`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DataSource {
    /// `digits`: the UCI handwritten digits, 8x8, inside the binary.
    Digits,
    /// `idx:DIR`: a folder with MNIST's or Fashion-MNIST's four files, plain or gzipped.
    Idx(PathBuf),
    /// `cifar10:DIR`: a folder with the binary version of CIFAR-10.
    Cifar10(PathBuf),
}

/// The two parts of a data set.
#[derive(Clone, Debug)]
pub struct Data {
    /// The examples for training.
    pub train: Dataset,
    /// The examples for measuring accuracy; normalised like `train`.
    pub test: Dataset,
}

impl DataSource {
    /// Reads both parts.
    ///
    /// # Errors
    /// Whatever is wrong with a file, with its path, what was expected and what was found.
    pub fn load(&self) -> Result<Data, DataError> {
        match self {
            DataSource::Digits => idx::read_digits(),
            DataSource::Idx(folder) => idx::read_folder(folder),
            DataSource::Cifar10(folder) => cifar10::read_folder(folder),
        }
    }
}

impl FromStr for DataSource {
    type Err = DataError;

    fn from_str(text: &str) -> Result<Self, DataError> {
        let folder = |path: &str| (!path.is_empty()).then(|| PathBuf::from(path));
        match text.split_once(':') {
            None if text == "digits" => Some(DataSource::Digits),
            Some(("idx", path)) => folder(path).map(DataSource::Idx),
            Some(("cifar10", path)) => folder(path).map(DataSource::Cifar10),
            _ => None,
        }
        .ok_or_else(|| DataError::UnknownSource(text.to_owned()))
    }
}

impl fmt::Display for DataSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DataSource::Digits => f.write_str("digits"),
            DataSource::Idx(folder) => write!(f, "idx:{}", folder.display()),
            DataSource::Cifar10(folder) => write!(f, "cifar10:{}", folder.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_survive_text_and_others_are_explained() {
        for text in ["digits", "idx:/data/mnist", "cifar10:relative/folder", "idx:C:\\data"] {
            assert_eq!(text.parse::<DataSource>().unwrap().to_string(), text);
        }
        for text in ["", "mnist", "idx", "idx:", "cifar10:", "digits:here"] {
            let error = text.parse::<DataSource>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{text}`")) && error.contains("idx:DIR"), "{error}");
        }
    }
}
