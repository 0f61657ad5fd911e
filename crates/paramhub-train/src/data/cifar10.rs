//! The binary version of CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009).

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use super::{Data, DataError, Dataset, Geometry};

const GEOMETRY: Geometry = Geometry { channels: 3, height: 32, width: 32, classes: 10 };
const PIXELS: usize = 32 * 32;
/// One label and three planes of pixels.
const RECORD_BYTES: usize = 1 + 3 * PIXELS;
/// The records of an original file; smaller extracts are accepted.
const RECORDS_MAX: usize = 10_000;

/// `data_batch_1.bin` to `data_batch_5.bin` for training, `test_batch.bin` for testing.
pub(super) fn read_folder(folder: &Path) -> Result<Data, DataError> {
    let names: Vec<String> = (1..=5).map(|batch| format!("data_batch_{batch}.bin")).collect();
    let train = read_part(folder, &names)?;
    let test = read_part(folder, &["test_batch.bin".to_owned()])?;
    Ok(Data { test: test.normalised_like(&train), train })
}

fn read_part(folder: &Path, names: &[String]) -> Result<Dataset, DataError> {
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for name in names {
        let path = folder.join(name);
        let file = path.display().to_string();
        let records = read(&path, &file).map_err(|error| match error {
            DataError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                DataError::Missing { folder: folder.to_owned(), expected: format!("`{name}`") }
            }
            other => other,
        })?;
        for (position, record) in records.chunks_exact(RECORD_BYTES).enumerate() {
            if usize::from(record[0]) >= GEOMETRY.classes {
                return Err(DataError::Label { file, classes: GEOMETRY.classes, found: record[0], position });
            }
            labels.push(record[0]);
            pixels
                .extend((0..PIXELS).flat_map(|at| (0..3).map(move |plane| record[1 + plane * PIXELS + at])));
        }
    }
    Ok(Dataset::new(GEOMETRY, pixels, labels))
}

fn read(path: &Path, file: &str) -> Result<Vec<u8>, DataError> {
    let refused = |source| DataError::Read { file: file.to_owned(), source };
    let limit = RECORDS_MAX * RECORD_BYTES;
    let mut bytes = Vec::new();
    File::open(path).map_err(refused)?.take(limit as u64 + 1).read_to_end(&mut bytes).map_err(refused)?;
    if bytes.len() > limit {
        return Err(DataError::Trailing { file: file.to_owned(), expected: limit as u64 });
    }
    if bytes.is_empty() || !bytes.len().is_multiple_of(RECORD_BYTES) {
        let expected = (bytes.len().div_ceil(RECORD_BYTES).max(1) * RECORD_BYTES) as u64;
        return Err(DataError::Truncated { file: file.to_owned(), expected, found: bytes.len() as u64 });
    }
    Ok(bytes)
}
