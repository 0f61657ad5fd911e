use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a data set cannot be used: which file, what was expected, what was found.
#[derive(Debug, Error)]
pub enum DataError {
    /// The name of the source is unknown.
    #[error(
        "`{0}` is not a data set: use `digits`, `idx:DIR` for a folder with MNIST's four files, or `cifar10:DIR` for \
         a folder with the binary version of CIFAR-10"
    )]
    UnknownSource(String),
    /// A file of the data set is not there.
    #[error("{folder}: no {expected} in this folder", folder = folder.display())]
    Missing {
        /// The folder given.
        folder: PathBuf,
        /// The file name, or names, looked for.
        expected: String,
    },
    /// The operating system, or the decompressor, refuses.
    #[error("{file}: {source}")]
    Read {
        /// Path of the file.
        file: String,
        /// Its reason.
        source: io::Error,
    },
    /// The file does not begin like one of its format.
    #[error("{file}: expected the magic number {expected:#010x} of {meaning}, found {found:#010x}")]
    Magic {
        /// Path of the file.
        file: String,
        /// The first four bytes, big-endian, that it should have.
        expected: u32,
        /// What they stand for.
        meaning: &'static str,
        /// The ones it has.
        found: u32,
    },
    /// The file ends too early.
    #[error("{file}: truncated: expected {expected} bytes, found {found}")]
    Truncated {
        /// Path of the file.
        file: String,
        /// Bytes that its header, or its format, announces (after decompression).
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The file goes on after its end.
    #[error("{file}: expected {expected} bytes, found more after them")]
    Trailing {
        /// Path of the file.
        file: String,
        /// Bytes that its header, or its format, announces (after decompression).
        expected: u64,
    },
    /// An extent in the header is zero, too large, or not that of the other files.
    #[error("{file}: expected {expected}, found {found}")]
    Extent {
        /// Path of the file.
        file: String,
        /// What is acceptable.
        expected: String,
        /// What the file says.
        found: String,
    },
    /// Images and labels are not equally many.
    #[error("{file}: expected {expected} labels, one for each image, found {found}")]
    Count {
        /// Path of the file with the labels.
        file: String,
        /// Number of images.
        expected: usize,
        /// Number of labels.
        found: usize,
    },
    /// A label names no class.
    #[error("{file}: expected labels from 0 to {max}, found {found} at position {position}", max = classes - 1)]
    Label {
        /// Path of the file with the labels.
        file: String,
        /// Number of classes.
        classes: usize,
        /// The label.
        found: u8,
        /// Which example has it, from 0.
        position: usize,
    },
}
