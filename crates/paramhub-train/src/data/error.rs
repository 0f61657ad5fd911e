use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// The reason why a data set cannot be used: the file, what was expected and what was found.
#[derive(Debug, Error)]
pub enum DataError {
    /// The name of the data set is unknown.
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
        /// The file name, or names, that are missing.
        expected: String,
    },
    /// The operating system or the decompressor cannot read the file.
    #[error("{file}: cannot be read")]
    Read {
        /// Path of the file.
        file: String,
        /// The cause.
        source: io::Error,
    },
    /// The file does not begin like one of its format.
    #[error("{file}: expected the magic number {expected:#010x} of {meaning}, found {found:#010x}")]
    Magic {
        /// Path of the file.
        file: String,
        /// The first four bytes that the file should have, big-endian.
        expected: u32,
        /// The meaning of these bytes.
        meaning: &'static str,
        /// The first four bytes of the file.
        found: u32,
    },
    /// The file ends too early.
    #[error("{file}: truncated: expected {expected} bytes, found {found}")]
    Truncated {
        /// Path of the file.
        file: String,
        /// Bytes that the file's header or its format announces (after decompression).
        expected: u64,
        /// Bytes found.
        found: u64,
    },
    /// The file has more bytes than announced.
    #[error("{file}: expected {expected} bytes, found more after them")]
    Trailing {
        /// Path of the file.
        file: String,
        /// Bytes that the file's header or its format announces (after decompression).
        expected: u64,
    },
    /// A size in the header is zero, too large, or not that of the other files.
    #[error("{file}: expected {expected}, found {found}")]
    Size {
        /// Path of the file.
        file: String,
        /// The accepted values.
        expected: String,
        /// The value in the file.
        found: String,
    },
    /// The numbers of images and labels differ.
    #[error("{file}: expected {expected} labels, one for each image, found {found}")]
    Count {
        /// Path of the file with the labels.
        file: String,
        /// Number of images.
        expected: usize,
        /// Number of labels.
        found: usize,
    },
    /// A label is not the number of a class.
    #[error("{file}: expected labels from 0 to {max}, found {found} at position {position}", max = classes - 1)]
    Label {
        /// Path of the file with the labels.
        file: String,
        /// Number of classes.
        classes: usize,
        /// The label.
        found: u8,
        /// The position of the example with that label, from 0.
        position: usize,
    },
}
