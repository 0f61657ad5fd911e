//! Tensors in files of the safetensors format, streamed: no tensor is ever assembled in memory, and
//! everything that is written or read passes through a digest.
//!
//! The safetensors crate makes and reads the headers. Its own writers need each tensor in one piece, and do
//! not sync.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};

/// Bytes written, or read, at once.
const BLOCK_BYTES: usize = 1 << 20;
/// The longest header that is read.
const HEAD_BYTES_MAX: u64 = 1 << 30;

/// A tensor's name and shape; all are f32.
pub(super) type Shape = (String, Vec<usize>);
/// Takes the next values of the tensor that is being written.
pub(super) type Put<'a> = &'a mut dyn FnMut(&[f32]) -> io::Result<()>;

/// Writes a file and syncs it; `values` supplies the values of the tensor of this number, in order. Returns
/// the file's length and digest.
pub(super) fn write(
    path: &Path,
    shapes: Vec<Shape>,
    mut values: impl FnMut(usize, Put<'_>) -> io::Result<()>,
) -> io::Result<(u64, blake3::Hash)> {
    let tensors = shapes.len();
    let head = head_of(shapes)?;
    let inner = BufWriter::with_capacity(BLOCK_BYTES, File::create(path)?);
    let mut file = Hashed { inner, hasher: blake3::Hasher::new(), bytes: 0 };
    file.put(&(head.len() as u64).to_le_bytes())?;
    file.put(&head)?;
    for tensor in 0..tensors {
        values(tensor, &mut |values| file.put(bytemuck::cast_slice(values)))?;
    }
    let Hashed { inner, hasher, bytes } = file;
    inner.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    Ok((bytes, hasher.finalize()))
}

fn head_of(shapes: Vec<Shape>) -> io::Result<Vec<u8>> {
    let mut end = 0;
    let infos = shapes.into_iter().map(|(name, shape)| {
        let start = end;
        end += shape.iter().product::<usize>() * size_of::<f32>();
        (name, TensorInfo { dtype: Dtype::F32, shape, data_offsets: (start, end) })
    });
    // Loaders of PyTorch models require this entry.
    let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(about), infos.collect()).map_err(io::Error::other)?;
    let mut head = serde_json::to_vec(&metadata)?;
    head.resize(head.len().next_multiple_of(8), b' ');
    Ok(head)
}

struct Hashed<W> {
    inner: W,
    hasher: blake3::Hasher,
    bytes: u64,
}

/// Reads a whole file that must have these tensors in this order, this length and this digest. `take` gets
/// the number of the tensor, the position of the first value in it, and the values; these are valid only if
/// the result is `Ok`.
pub(super) fn read(
    path: &Path,
    shapes: &[Shape],
    bytes: u64,
    digest: &str,
    mut take: impl FnMut(usize, u64, &[f32]),
) -> Result<(), String> {
    let unreadable = |error: io::Error| format!("cannot be read: {error}");
    let mut file = File::open(path).map_err(unreadable)?;
    let found = file.metadata().map_err(unreadable)?.len();
    if found != bytes {
        return Err(format!("has {found} bytes, not the {bytes} that were written: it is torn"));
    }
    let mut hasher = blake3::Hasher::new();
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(unreadable)?;
    hasher.update(&length);
    let length = u64::from_le_bytes(length);
    if length > HEAD_BYTES_MAX.min(bytes.saturating_sub(8)) {
        return Err("is not in the safetensors format".into());
    }
    let mut head = vec![0; length as usize];
    file.read_exact(&mut head).map_err(unreadable)?;
    hasher.update(&head);
    let head: Metadata = serde_json::from_slice(&head)
        .map_err(|error| format!("is not in the safetensors format: {error}"))?;
    let mut end = 0;
    for (name, shape) in shapes {
        let start = end;
        end += shape.iter().product::<usize>() * size_of::<f32>();
        let matches_manifest = head.info(name).is_some_and(|info| {
            info.dtype == Dtype::F32 && info.shape == *shape && info.data_offsets == (start, end)
        });
        if !matches_manifest {
            return Err(format!("has no tensor `{name}` where the manifest says"));
        }
    }
    if 8 + length + end as u64 != bytes {
        return Err("has more in it than the manifest says".into());
    }
    let mut block = vec![0.0_f32; BLOCK_BYTES / size_of::<f32>()];
    for (tensor, (_, shape)) in shapes.iter().enumerate() {
        let (mut at, elements) = (0, shape.iter().product::<usize>());
        while at < elements {
            let values = &mut block[..(elements - at).min(BLOCK_BYTES / size_of::<f32>())];
            let wire: &mut [u8] = bytemuck::cast_slice_mut(values);
            file.read_exact(wire).map_err(unreadable)?;
            hasher.update(wire);
            take(tensor, at as u64, values);
            at += values.len();
        }
    }
    match hasher.finalize().to_hex().as_str() == digest {
        true => Ok(()),
        false => Err("has another digest than was written: it has been damaged".into()),
    }
}

impl<W: Write> Hashed<W> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.inner.write_all(bytes)?;
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;

    #[test]
    fn files_are_safetensors_and_any_damage_shows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        let shapes =
            vec![("a".to_owned(), vec![2, 3]), ("b".to_owned(), vec![]), ("c".to_owned(), vec![300_000])];
        let value = |tensor: usize, element: usize| (tensor * 1_000_000 + element) as f32;
        let all = |tensor: usize, put: Put<'_>| {
            let elements: usize = shapes[tensor].1.iter().product();
            let values: Vec<f32> = (0..elements).map(|element| value(tensor, element)).collect();
            values.chunks(1000).try_for_each(put)
        };
        let (bytes, digest) = write(&path, shapes.clone(), all).unwrap();
        let digest = digest.to_hex();
        let file = std::fs::read(&path).unwrap();
        assert_eq!(file.len() as u64, bytes);
        let tensors = SafeTensors::deserialize(&file).unwrap();
        assert_eq!(tensors.tensor("a").unwrap().shape(), [2, 3]);
        assert_eq!(tensors.tensor("b").unwrap().data(), 1_000_000_f32.to_le_bytes());

        let mut found: Vec<Vec<f32>> = vec![Vec::new(); 3];
        read(&path, &shapes, bytes, &digest, |tensor, first, values| {
            assert_eq!(found[tensor].len() as u64, first);
            found[tensor].extend_from_slice(values);
        })
        .unwrap();
        assert!((0..300_000).all(|element| found[2][element] == value(2, element)));
        let reread = |shapes: &[Shape]| read(&path, shapes, bytes, &digest, |_, _, _| {}).unwrap_err();
        assert!(reread(&shapes[..2]).contains("more in it"));
        let mut other = shapes.clone();
        other[0].1 = vec![3, 2];
        assert!(reread(&other).contains("no tensor `a`"));
        for at in [0, 9, 100, file.len() / 2, file.len() - 1] {
            let mut damaged = file.clone();
            damaged[at] ^= 4;
            std::fs::write(&path, &damaged).unwrap();
            assert!(!reread(&shapes).is_empty(), "flipped at {at}");
        }
        std::fs::write(&path, &file[..file.len() - 1]).unwrap();
        assert!(reread(&shapes).contains("torn"));
    }
}
