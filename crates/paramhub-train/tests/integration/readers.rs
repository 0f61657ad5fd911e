//! Every flaw that a data file can have. The error must name the file, what was expected and what was found.

use std::fs;
use std::io::Write;
use std::path::Path;

use paramhub_train::data::{Data, DataError, DataSource, Geometry};

const TRAIN_IMAGES: &str = "train-images-idx3-ubyte";
const TRAIN_LABELS: &str = "train-labels-idx1-ubyte";
const TEST_IMAGES: &str = "t10k-images-idx3-ubyte";
const TEST_LABELS: &str = "t10k-labels-idx1-ubyte";

fn idx(extents: &[u32], values: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, extents.len() as u8];
    bytes.extend(extents.iter().flat_map(|extent| extent.to_be_bytes()));
    bytes.extend(values);
    bytes
}

/// Four good files: 3 and 2 images of 2x3 pixels.
fn good() -> [(&'static str, Vec<u8>); 4] {
    [
        (TRAIN_IMAGES, idx(&[3, 2, 3], &(0..18).collect::<Vec<u8>>())),
        (TRAIN_LABELS, idx(&[3], &[7, 0, 9])),
        (TEST_IMAGES, idx(&[2, 2, 3], &(100..112).collect::<Vec<u8>>())),
        (TEST_LABELS, idx(&[2], &[1, 2])),
    ]
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn load(folder: &Path) -> Result<Data, DataError> {
    DataSource::Idx(folder.to_owned()).load()
}

/// The error of loading when one file, plain or gzipped, is replaced.
fn offence(name: &str, bytes: &[u8]) -> (DataError, String) {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in good() {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    fs::remove_file(folder.path().join(name.trim_end_matches(".gz"))).unwrap();
    fs::write(folder.path().join(name), bytes).unwrap();
    let error = load(folder.path()).unwrap_err();
    let message = error.to_string();
    assert!(message.contains(name), "{message}");
    (error, message)
}

#[test]
fn plain_and_gzipped_files_read_alike() {
    let folder = tempfile::tempdir().unwrap();
    for (position, (name, bytes)) in good().into_iter().enumerate() {
        match position % 2 {
            0 => fs::write(folder.path().join(format!("{name}.gz")), gzip(&bytes)).unwrap(),
            _ => fs::write(folder.path().join(name), bytes).unwrap(),
        }
    }
    let data = load(folder.path()).unwrap();
    assert_eq!(data.train.geometry(), Geometry { channels: 1, height: 2, width: 3, classes: 10 });
    assert_eq!((data.train.len(), data.test.len()), (3, 2));
    assert_eq!(data.train.pixels(1), [6, 7, 8, 9, 10, 11]);
    assert_eq!((0..3).map(|example| data.train.label(example)).collect::<Vec<_>>(), [7, 0, 9]);
    assert_eq!(data.test.pixels(1), [106, 107, 108, 109, 110, 111]);
}

#[test]
fn a_missing_file_or_folder_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in good() {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    fs::remove_file(folder.path().join(TEST_LABELS)).unwrap();
    let message = load(folder.path()).unwrap_err().to_string();
    assert!(message.contains(TEST_LABELS) && message.contains(".gz"), "{message}");
    let message = load(&folder.path().join("nowhere")).unwrap_err().to_string();
    assert!(message.contains("nowhere") && message.contains(TRAIN_IMAGES), "{message}");
}

#[test]
fn a_truncated_file_says_how_much_is_there() {
    let whole = idx(&[3, 2, 3], &[0; 18]);
    for (length, expected) in [(0, 16), (3, 16), (15, 16), (16, 34), (33, 34)] {
        let (error, message) = offence(TRAIN_IMAGES, &whole[..length]);
        assert!(matches!(error, DataError::Truncated { .. }), "{error:?}");
        assert!(message.contains(&format!("expected {expected} bytes, found {length}")), "{message}");
    }
    let (error, _) = offence(TRAIN_LABELS, &idx(&[3], &[1, 2]));
    assert!(matches!(error, DataError::Truncated { expected: 11, found: 10, .. }), "{error:?}");
}

#[test]
fn a_truncated_or_broken_gzip_stream_is_refused() {
    // Incompressible, so that half of the stream is about half of the data.
    let values: Vec<u8> = (0u32..3 * 40 * 40).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let packed = gzip(&idx(&[3, 40, 40], &values));
    let (error, _) = offence(&format!("{TRAIN_IMAGES}.gz"), &packed[..packed.len() / 2]);
    assert!(matches!(error, DataError::Truncated { expected: 4816, .. }), "{error:?}");
    let (error, _) = offence(&format!("{TRAIN_IMAGES}.gz"), b"not gzip at all");
    assert!(matches!(error, DataError::Read { .. }), "{error:?}");
}

#[test]
fn a_wrong_magic_number_shows_both() {
    let (error, message) = offence(TRAIN_IMAGES, &idx(&[3], &[1, 2, 3]));
    assert!(matches!(error, DataError::Magic { found: 0x0801, .. }), "{error:?}");
    assert!(message.contains("0x00000803") && message.contains("0x00000801"), "{message}");
    let (error, _) = offence(TRAIN_LABELS, &[0x1f, 0x8b, 8, 0, 0, 0, 0, 0]);
    assert!(matches!(error, DataError::Magic { found: 0x1f8b_0800, .. }), "{error:?}");
}

#[test]
fn trailing_bytes_are_refused() {
    let mut bytes = idx(&[3, 2, 3], &[0; 18]);
    bytes.push(0);
    let (error, _) = offence(TRAIN_IMAGES, &bytes);
    assert!(matches!(error, DataError::Trailing { expected: 34, .. }), "{error:?}");
}

#[test]
fn absurd_extents_are_refused_before_anything_is_allocated() {
    for extents in [[u32::MAX; 3], [0, 2, 3], [3, 0, 3], [3, 2, 2000], [10_000_000, 1024, 1024]] {
        let (error, _) = offence(TRAIN_IMAGES, &idx(&extents, &[]));
        assert!(matches!(error, DataError::Size { .. }), "{error:?}");
    }
    let (error, message) = offence(TEST_IMAGES, &idx(&[2, 3, 3], &[0; 18]));
    assert!(matches!(error, DataError::Size { .. }), "{error:?}");
    assert!(message.contains("2x3") && message.contains("3x3"), "{message}");
}

#[test]
fn labels_must_match_the_images_and_the_classes() {
    let (error, _) = offence(TRAIN_LABELS, &idx(&[2], &[7, 0]));
    assert!(matches!(error, DataError::Count { expected: 3, found: 2, .. }), "{error:?}");
    let (error, message) = offence(TEST_LABELS, &idx(&[2], &[1, 10]));
    assert!(matches!(error, DataError::Label { found: 10, position: 1, .. }), "{error:?}");
    assert!(message.contains("0 to 9") && message.contains("found 10"), "{message}");
}

#[test]
fn the_bundled_digits_are_complete() {
    let data = DataSource::Digits.load().unwrap();
    assert_eq!((data.train.len(), data.test.len()), (1437, 360));
    assert_eq!(data.train.geometry(), Geometry { channels: 1, height: 8, width: 8, classes: 10 });
    assert!((0..1437).all(|example| data.train.pixels(example).iter().all(|&value| value <= 16)));
    let mut per_class = [0; 10];
    (0..360).for_each(|example| per_class[usize::from(data.test.label(example))] += 1);
    assert!(per_class.iter().all(|&count| count > 20), "{per_class:?}");
    // Their folder is itself an IDX data set.
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/digits");
    let read = load(&folder).unwrap();
    assert!((0..1437).all(|example| read.train.pixels(example) == data.train.pixels(example)));
}

const CIFAR_FILES: [&str; 6] = [
    "data_batch_1.bin",
    "data_batch_2.bin",
    "data_batch_3.bin",
    "data_batch_4.bin",
    "data_batch_5.bin",
    "test_batch.bin",
];

fn cifar_record(label: u8) -> Vec<u8> {
    let mut record = vec![label];
    for plane in [10u8, 20, 30] {
        record.extend((0..1024u32).map(|at| plane.wrapping_add(at as u8)));
    }
    record
}

#[test]
fn cifar10_planes_become_channels_last() {
    let folder = tempfile::tempdir().unwrap();
    for (label, name) in (0..).zip(CIFAR_FILES) {
        fs::write(folder.path().join(name), [cifar_record(label), cifar_record(9)].concat()).unwrap();
    }
    let data = DataSource::Cifar10(folder.path().to_owned()).load().unwrap();
    assert_eq!((data.train.len(), data.test.len()), (10, 2));
    assert_eq!(data.train.geometry(), Geometry { channels: 3, height: 32, width: 32, classes: 10 });
    assert_eq!(data.train.pixels(2)[..6], [10, 20, 30, 11, 21, 31]);
    assert_eq!([0, 1, 2, 3].map(|example| data.train.label(example)), [0, 9, 1, 9]);
}

#[test]
fn cifar10_offences_name_the_file() {
    let offence = |name: &str, bytes: Option<Vec<u8>>| {
        let folder = tempfile::tempdir().unwrap();
        for name in CIFAR_FILES {
            fs::write(folder.path().join(name), cifar_record(1)).unwrap();
        }
        match bytes {
            Some(bytes) => fs::write(folder.path().join(name), bytes).unwrap(),
            None => fs::remove_file(folder.path().join(name)).unwrap(),
        }
        let error = DataSource::Cifar10(folder.path().to_owned()).load().unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        error
    };
    assert!(matches!(offence(CIFAR_FILES[4], None), DataError::Missing { .. }));
    let error = offence(CIFAR_FILES[1], Some(cifar_record(1)[..3072].to_vec()));
    assert!(matches!(error, DataError::Truncated { expected: 3073, found: 3072, .. }), "{error:?}");
    let error = offence(CIFAR_FILES[5], Some(Vec::new()));
    assert!(matches!(error, DataError::Truncated { expected: 3073, found: 0, .. }), "{error:?}");
    let error = offence(CIFAR_FILES[2], Some([cifar_record(1), cifar_record(10)].concat()));
    assert!(matches!(error, DataError::Label { found: 10, position: 1, .. }), "{error:?}");
    let error = offence(CIFAR_FILES[0], Some(vec![0; 10_001 * 3073]));
    assert!(matches!(error, DataError::Trailing { .. }), "{error:?}");
}
