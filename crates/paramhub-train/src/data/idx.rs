//! IDX, the format of MNIST and Fashion-MNIST (described on MNIST's page, "FILE FORMATS FOR THE MNIST DATABASE").

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use super::{Data, DataError, Dataset, Geometry};

/// MNIST, Fashion-MNIST and the bundled digits all have ten.
const CLASSES: usize = 10;
const EXAMPLES_MAX: u64 = 10_000_000;
const SIDE_MAX: u64 = 1024;
const BYTES_MAX: u64 = 1 << 30;

/// The four files of a data set in a folder, each plain or with `.gz`.
pub(super) fn read_folder(folder: &Path) -> Result<Data, DataError> {
    let read = |name: &str, dimensions: usize| -> Result<(Idx, String), DataError> {
        for (path, gzipped) in [(folder.join(name), false), (folder.join(format!("{name}.gz")), true)] {
            let shown = path.display().to_string();
            let file = match File::open(&path) {
                Ok(file) => BufReader::new(file),
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(source) => return Err(DataError::Read { file: shown, source }),
            };
            let idx = match gzipped {
                true => Idx::read(MultiGzDecoder::new(file), &shown, dimensions)?,
                false => Idx::read(file, &shown, dimensions)?,
            };
            return Ok((idx, shown));
        }
        Err(DataError::Missing { folder: folder.to_owned(), expected: format!("`{name}` or `{name}.gz`") })
    };
    read_parts(read)
}

/// The UCI handwritten digits, from inside the binary (see data/digits/README.md).
pub(super) fn read_digits() -> Result<Data, DataError> {
    const FILES: [(&str, &[u8]); 4] = [
        ("train-images-idx3-ubyte", include_bytes!("../../../../data/digits/train-images-idx3-ubyte")),
        ("train-labels-idx1-ubyte", include_bytes!("../../../../data/digits/train-labels-idx1-ubyte")),
        ("t10k-images-idx3-ubyte", include_bytes!("../../../../data/digits/t10k-images-idx3-ubyte")),
        ("t10k-labels-idx1-ubyte", include_bytes!("../../../../data/digits/t10k-labels-idx1-ubyte")),
    ];
    read_parts(|name, dimensions| {
        let (_, bytes) = FILES.iter().find(|(file, _)| *file == name).expect("the four files are embedded");
        let shown = format!("digits/{name}");
        Ok((Idx::read(*bytes, &shown, dimensions)?, shown))
    })
}

fn read_parts(read: impl Fn(&str, usize) -> Result<(Idx, String), DataError>) -> Result<Data, DataError> {
    let train = read_part("train", &read)?;
    let test = read_part("t10k", &read)?;
    if test.0.geometry() != train.0.geometry() {
        let (expected, found) = (train.0.geometry(), test.0.geometry());
        return Err(DataError::Size {
            file: test.1,
            expected: format!("images of {}x{} as for training", expected.height, expected.width),
            found: format!("{}x{}", found.height, found.width),
        });
    }
    Ok(Data { test: test.0.normalised_like(&train.0), train: train.0 })
}

/// Images with their labels, and the path of the images.
fn read_part(
    prefix: &str,
    read: &impl Fn(&str, usize) -> Result<(Idx, String), DataError>,
) -> Result<(Dataset, String), DataError> {
    let (images, images_file) = read(&format!("{prefix}-images-idx3-ubyte"), 3)?;
    let (labels, labels_file) = read(&format!("{prefix}-labels-idx1-ubyte"), 1)?;
    let geometry =
        Geometry { channels: 1, height: images.sizes[1], width: images.sizes[2], classes: CLASSES };
    check_labels(&labels.values, images.sizes[0], CLASSES, &labels_file)?;
    Ok((Dataset::new(geometry, images.values, labels.values), images_file))
}

fn check_labels(labels: &[u8], images: usize, classes: usize, file: &str) -> Result<(), DataError> {
    if labels.len() != images {
        return Err(DataError::Count { file: file.to_owned(), expected: images, found: labels.len() });
    }
    match labels.iter().position(|&label| usize::from(label) >= classes) {
        Some(position) => {
            Err(DataError::Label { file: file.to_owned(), classes, found: labels[position], position })
        }
        None => Ok(()),
    }
}

/// One file: unsigned bytes in up to three dimensions.
struct Idx {
    /// The size of each dimension.
    sizes: Vec<usize>,
    values: Vec<u8>,
}

impl Idx {
    /// Reads a file of bytes with this many dimensions. The memory used grows with what arrives, not with what a header
    /// claims.
    fn read(mut reader: impl Read, file: &str, dimensions: usize) -> Result<Self, DataError> {
        let header_bytes = 4 + 4 * dimensions as u64;
        let mut header = Vec::with_capacity(header_bytes as usize);
        read_up_to(&mut reader, header_bytes, &mut header, file)?;
        let words: Vec<u32> =
            header.chunks_exact(4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]])).collect();
        // 0x08 means unsigned bytes.
        let expected_magic = 0x0800 | dimensions as u32;
        if let Some(&found) = words.first().filter(|&&magic| magic != expected_magic) {
            let meaning = if dimensions == 3 {
                "IDX images (bytes, 3 dimensions)"
            } else {
                "IDX labels (bytes, 1 dimension)"
            };
            return Err(DataError::Magic { file: file.to_owned(), expected: expected_magic, meaning, found });
        }
        if (header.len() as u64) < header_bytes {
            let found = header.len() as u64;
            return Err(DataError::Truncated { file: file.to_owned(), expected: header_bytes, found });
        }
        let sizes: Vec<u64> = words[1..].iter().map(|&size| u64::from(size)).collect();
        check_sizes(&sizes, file)?;
        let value_bytes: u64 = sizes.iter().product();
        let mut values = Vec::new();
        read_up_to(&mut reader, value_bytes + 1, &mut values, file)?;
        let (expected, found) = (header_bytes + value_bytes, header_bytes + values.len() as u64);
        match found.cmp(&expected) {
            std::cmp::Ordering::Less => Err(DataError::Truncated { file: file.to_owned(), expected, found }),
            std::cmp::Ordering::Greater => Err(DataError::Trailing { file: file.to_owned(), expected }),
            std::cmp::Ordering::Equal => {
                Ok(Idx { sizes: sizes.iter().map(|&size| size as usize).collect(), values })
            }
        }
    }
}

/// Refuses sizes whose product would exceed [`BYTES_MAX`]. The single limits keep the product from overflowing.
fn check_sizes(sizes: &[u64], file: &str) -> Result<(), DataError> {
    let refused =
        |expected: String, found: String| Err(DataError::Size { file: file.to_owned(), expected, found });
    if !(1..=EXAMPLES_MAX).contains(&sizes[0]) {
        return refused(format!("1 to {EXAMPLES_MAX} examples"), sizes[0].to_string());
    }
    if sizes[1..].iter().any(|side| !(1..=SIDE_MAX).contains(side)) {
        return refused(
            format!("images of 1 to {SIDE_MAX} pixels a side"),
            format!("{}x{}", sizes[1], sizes[2]),
        );
    }
    match sizes.iter().product::<u64>() {
        bytes if bytes > BYTES_MAX => {
            refused(format!("at most {BYTES_MAX} bytes of pixels"), bytes.to_string())
        }
        _ => Ok(()),
    }
}

/// Appends at most `limit` bytes. If compressed data is cut off, this returns what came before; the caller then
/// finds the file too short.
fn read_up_to(reader: &mut impl Read, limit: u64, into: &mut Vec<u8>, file: &str) -> Result<(), DataError> {
    match reader.take(limit).read_to_end(into) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
        Err(source) => Err(DataError::Read { file: file.to_owned(), source }),
        Ok(_) => Ok(()),
    }
}
