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
pub(super) fn folder(folder: &Path) -> Result<Data, DataError> {
    let read = |name: &str, extents: usize| -> Result<(Idx, String), DataError> {
        for (path, gzipped) in [(folder.join(name), false), (folder.join(format!("{name}.gz")), true)] {
            let shown = path.display().to_string();
            let file = match File::open(&path) {
                Ok(file) => BufReader::new(file),
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(source) => return Err(DataError::Read { file: shown, source }),
            };
            let idx = match gzipped {
                true => Idx::read(MultiGzDecoder::new(file), &shown, extents)?,
                false => Idx::read(file, &shown, extents)?,
            };
            return Ok((idx, shown));
        }
        Err(DataError::Missing { folder: folder.to_owned(), expected: format!("`{name}` or `{name}.gz`") })
    };
    load(read)
}

/// The UCI handwritten digits, from inside the binary (see data/digits/README.md).
pub(super) fn digits() -> Result<Data, DataError> {
    const FILES: [(&str, &[u8]); 4] = [
        ("train-images-idx3-ubyte", include_bytes!("../../../../data/digits/train-images-idx3-ubyte")),
        ("train-labels-idx1-ubyte", include_bytes!("../../../../data/digits/train-labels-idx1-ubyte")),
        ("t10k-images-idx3-ubyte", include_bytes!("../../../../data/digits/t10k-images-idx3-ubyte")),
        ("t10k-labels-idx1-ubyte", include_bytes!("../../../../data/digits/t10k-labels-idx1-ubyte")),
    ];
    load(|name, extents| {
        let (_, bytes) = FILES.iter().find(|(file, _)| *file == name).expect("the four files are embedded");
        let shown = format!("digits/{name}");
        Ok((Idx::read(*bytes, &shown, extents)?, shown))
    })
}

fn load(read: impl Fn(&str, usize) -> Result<(Idx, String), DataError>) -> Result<Data, DataError> {
    let train = part("train", &read)?;
    let test = part("t10k", &read)?;
    if test.0.geometry() != train.0.geometry() {
        let (expected, found) = (train.0.geometry(), test.0.geometry());
        return Err(DataError::Extent {
            file: test.1,
            expected: format!("images of {}x{} as for training", expected.height, expected.width),
            found: format!("{}x{}", found.height, found.width),
        });
    }
    Ok(Data { test: test.0.normalised_like(&train.0), train: train.0 })
}

/// Images with their labels, and the path of the images.
fn part(
    prefix: &str,
    read: &impl Fn(&str, usize) -> Result<(Idx, String), DataError>,
) -> Result<(Dataset, String), DataError> {
    let (images, images_file) = read(&format!("{prefix}-images-idx3-ubyte"), 3)?;
    let (labels, labels_file) = read(&format!("{prefix}-labels-idx1-ubyte"), 1)?;
    let geometry =
        Geometry { channels: 1, height: images.extents[1], width: images.extents[2], classes: CLASSES };
    check_labels(&labels.values, images.extents[0], CLASSES, &labels_file)?;
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
    extents: Vec<usize>,
    values: Vec<u8>,
}

impl Idx {
    /// Reads a file of bytes with this many extents. The memory used grows with what arrives, not with what a header
    /// claims.
    fn read(mut reader: impl Read, file: &str, dimensions: usize) -> Result<Self, DataError> {
        let header_bytes = 4 + 4 * dimensions as u64;
        let mut header = Vec::with_capacity(header_bytes as usize);
        read_up_to(&mut reader, header_bytes, &mut header, file)?;
        let words: Vec<u32> =
            header.chunks_exact(4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]])).collect();
        let expected_magic = 0x0800 | dimensions as u32;
        if let Some(&found) = words.first().filter(|&&magic| magic != expected_magic) {
            let meaning = if dimensions == 3 {
                "IDX images (bytes, 3 extents)"
            } else {
                "IDX labels (bytes, 1 extent)"
            };
            return Err(DataError::Magic { file: file.to_owned(), expected: expected_magic, meaning, found });
        }
        if (header.len() as u64) < header_bytes {
            let found = header.len() as u64;
            return Err(DataError::Truncated { file: file.to_owned(), expected: header_bytes, found });
        }
        let extents: Vec<u64> = words[1..].iter().map(|&extent| u64::from(extent)).collect();
        check_extents(&extents, file)?;
        let value_bytes: u64 = extents.iter().product();
        let mut values = Vec::new();
        read_up_to(&mut reader, value_bytes + 1, &mut values, file)?;
        let (expected, found) = (header_bytes + value_bytes, header_bytes + values.len() as u64);
        match found.cmp(&expected) {
            std::cmp::Ordering::Less => Err(DataError::Truncated { file: file.to_owned(), expected, found }),
            std::cmp::Ordering::Greater => Err(DataError::Trailing { file: file.to_owned(), expected }),
            std::cmp::Ordering::Equal => {
                Ok(Idx { extents: extents.iter().map(|&e| e as usize).collect(), values })
            }
        }
    }
}

/// Keeps every product below [`BYTES_MAX`], far from overflow.
fn check_extents(extents: &[u64], file: &str) -> Result<(), DataError> {
    let offence =
        |expected: String, found: String| Err(DataError::Extent { file: file.to_owned(), expected, found });
    if !(1..=EXAMPLES_MAX).contains(&extents[0]) {
        return offence(format!("1 to {EXAMPLES_MAX} examples"), extents[0].to_string());
    }
    if extents[1..].iter().any(|side| !(1..=SIDE_MAX).contains(side)) {
        return offence(
            format!("images of 1 to {SIDE_MAX} pixels a side"),
            format!("{}x{}", extents[1], extents[2]),
        );
    }
    match extents.iter().product::<u64>() {
        bytes if bytes > BYTES_MAX => {
            offence(format!("at most {BYTES_MAX} bytes of pixels"), bytes.to_string())
        }
        _ => Ok(()),
    }
}

/// Appends at most `limit` bytes. A compressed stream that breaks off counts as one that ends.
fn read_up_to(reader: &mut impl Read, limit: u64, into: &mut Vec<u8>, file: &str) -> Result<(), DataError> {
    match reader.take(limit).read_to_end(into) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
        Err(source) => Err(DataError::Read { file: file.to_owned(), source }),
        Ok(_) => Ok(()),
    }
}
