//! One hub's part of a checkpoint, from memory to the disk.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::folder::{JobFolder, settle, temporary_of, write_whole};
use super::manifest::{FileEntry, Manifest, ProgramStateEntry, TensorContents, TensorEntry};
use super::tensors::{self, Put, Shape};
use crate::core::{ChunkMark, Snapshot};

/// The number of times that a hub makes the folder of a checkpoint that other hubs have removed.
const BEGINNINGS_MAX: usize = 100;

/// A chunk of a tensor: the number of its snapshot, and its number there.
type Source = (usize, usize);

/// Writes the files of a part and, once they are durable, the manifest that makes the part count. It
/// completes `about`. Files that a failure leaves behind do not count, and are removed if possible.
pub(super) fn write(folder: &JobFolder, snapshots: &[Snapshot], mut about: Manifest) -> io::Result<Manifest> {
    let path = folder.of_step(about.step, about.namespace);
    let written = begin(folder, &path, about.hub).and_then(|()| fill(&path, snapshots, &mut about));
    if let Err(error) = written {
        clear(&path, about.hub);
        return Err(error);
    }
    Ok(about)
}

/// Makes the folder of a checkpoint and this hub's first file in it. From then on another hub whose part has failed cannot
/// remove the folder, which it does as long as that is empty.
fn begin(folder: &JobFolder, path: &Path, hub: u32) -> io::Result<()> {
    let manifest = temporary_of(&manifest_of(path, hub));
    for _ in 0..BEGINNINGS_MAX {
        folder.make(path)?;
        match File::create(&manifest) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            created => return created.map(drop),
        }
    }
    Err(io::Error::other("other hubs, whose parts have failed, remove the folder again and again"))
}

fn manifest_of(path: &Path, hub: u32) -> PathBuf {
    path.join(format!("hub-{hub}.json"))
}

fn fill(path: &Path, snapshots: &[Snapshot], about: &mut Manifest) -> io::Result<()> {
    let (tensors, sources) = tensors_of(snapshots, about);
    let of_keys: Vec<Shape> =
        tensors.iter().map(|tensor| (tensor.name.clone(), shape_of(tensor, about))).collect();
    about.files.push(file(
        path,
        &format!("hub-{}.safetensors", about.hub),
        TensorContents::Parameters,
        of_keys,
        |tensor, put| {
            sources[tensor]
                .iter()
                .try_for_each(|&(snapshot, chunk)| put(snapshots[snapshot].parameters(chunk)))
        },
    )?);
    let slots = about.state_slots;
    if slots > 0 {
        let of_state = state_shapes(&tensors, slots, about);
        let name = format!("hub-{}.state.safetensors", about.hub);
        about.files.push(file(path, &name, TensorContents::State, of_state, |tensor, put| {
            let (tensor, slot) = (tensor / slots, tensor % slots);
            sources[tensor].iter().try_for_each(|&(snapshot, chunk)| {
                snapshots[snapshot].state(chunk, slot).try_for_each(&mut *put)
            })
        })?);
    }
    if tensors.iter().any(|tensor| tensor.is_quantised) {
        let (shapes, sources) = quantised(&tensors, about)
            .map(|(tensor, shape)| (shape, &sources[tensor]))
            .unzip::<_, _, Vec<_>, Vec<_>>();
        let name = format!("hub-{}.received.safetensors", about.hub);
        about.files.push(file(path, &name, TensorContents::Received, shapes, |tensor, put| {
            sources[tensor].iter().try_for_each(|&(snapshot, chunk)| {
                put(snapshots[snapshot].received(chunk).expect("all chunks of a quantised key are"))
            })
        })?);
    }
    about.tensors = tensors;
    write_program_states(path, snapshots, about)?;
    about.written_ms = now_ms();
    write_whole(&manifest_of(path, about.hub), &about.encode())
}

/// Writes the program states of the ranks one behind the other, if this hub keeps any.
fn write_program_states(folder: &Path, snapshots: &[Snapshot], about: &mut Manifest) -> io::Result<()> {
    let states = || snapshots.iter().flat_map(|snapshot| &snapshot.program_states);
    about.program_states = states()
        .map(|(rank, bytes)| ProgramStateEntry {
            rank: *rank,
            bytes: bytes.len() as u64,
            blake3: blake3::hash(bytes).to_hex().to_string(),
        })
        .collect();
    if about.program_states.is_empty() {
        return Ok(());
    }
    let path = folder.join(about.program_states_name());
    let temporary = temporary_of(&path);
    let mut file = File::create(&temporary)?;
    states().try_for_each(|(_, bytes)| file.write_all(bytes))?;
    file.sync_all()?;
    settle(&temporary, &path)
}

/// The tensors of the state file.
pub(super) fn state_shapes(tensors: &[TensorEntry], slots: usize, about: &Manifest) -> Vec<Shape> {
    let slots_of = |tensor: &TensorEntry| {
        let shape = shape_of(tensor, about);
        (0..slots).map(|slot| (tensor.state_name(slot), shape.clone())).collect::<Vec<_>>()
    };
    tensors.iter().flat_map(slots_of).collect()
}

/// The tensors of the file of the ranks' parameters: their numbers among all tensors, and their shapes.
pub(super) fn quantised<'a>(
    tensors: &'a [TensorEntry],
    about: &'a Manifest,
) -> impl Iterator<Item = (usize, Shape)> + 'a {
    let of_quantised = tensors.iter().enumerate().filter(|(_, tensor)| tensor.is_quantised);
    of_quantised.map(|(number, tensor)| (number, (tensor.name.clone(), shape_of(tensor, about))))
}

/// The shape of a tensor: a whole key has its own shape, a part of one has a flat one.
pub(super) fn shape_of(tensor: &TensorEntry, about: &Manifest) -> Vec<usize> {
    let key = &about.keys.keys()[tensor.key as usize];
    match key.elements() == Some(tensor.elements) {
        true => key.shape.iter().map(|&extent| extent as usize).collect(),
        false => vec![tensor.elements as usize],
    }
}

fn file(
    folder: &Path,
    name: &str,
    holds: TensorContents,
    shapes: Vec<Shape>,
    values: impl FnMut(usize, Put<'_>) -> io::Result<()>,
) -> io::Result<FileEntry> {
    let path = folder.join(name);
    let temporary = temporary_of(&path);
    let (bytes, digest) = tensors::write(&temporary, shapes, values)?;
    settle(&temporary, &path)?;
    Ok(FileEntry { name: name.to_owned(), holds, bytes, blake3: digest.to_hex().to_string() })
}

/// Combines chunks that follow each other in a key.
fn tensors_of(snapshots: &[Snapshot], about: &Manifest) -> (Vec<TensorEntry>, Vec<Vec<Source>>) {
    let mut chunks: Vec<(u32, u64, u32, ChunkMark, Source)> = Vec::new();
    for (number, snapshot) in snapshots.iter().enumerate() {
        let here = snapshot.chunks().enumerate();
        chunks.extend(
            here.map(|(chunk, (key, first, elements, mark))| (key, first, elements, mark, (number, chunk))),
        );
    }
    chunks.sort_unstable_by_key(|&(key, first, ..)| (key, first));
    let (mut tensors, mut sources): (Vec<TensorEntry>, Vec<Vec<Source>>) = (Vec::new(), Vec::new());
    for (key, first, elements, mark, source) in chunks {
        let elements = u64::from(elements);
        let known = (elements, mark.version, mark.updates);
        match tensors.last_mut() {
            Some(last) if last.key == key && last.first + last.elements == first => {
                last.elements += elements;
                match last.updates.last_mut() {
                    Some(run) if (run.1, run.2) == (known.1, known.2) => run.0 += elements,
                    _ => last.updates.push(known),
                }
                sources.last_mut().expect("as many as tensors").push(source);
            }
            _ => {
                let name = String::new();
                let is_quantised = snapshots[source.0].received(source.1).is_some();
                tensors.push(TensorEntry { name, key, first, elements, updates: vec![known], is_quantised });
                sources.push(vec![source]);
            }
        }
    }
    let keys = about.keys.keys();
    let names: HashSet<&str> = keys.iter().map(|key| key.name.as_str()).collect();
    // The name of a part of a key must not be that of another key.
    let is_free = |separator: &String| {
        let name = |tensor: &TensorEntry| part_name(&keys[tensor.key as usize].name, separator, tensor.first);
        !tensors.iter().any(|tensor| names.contains(name(tensor).as_str()))
    };
    let separator = (1..).map(|length| "@".repeat(length)).find(is_free).expect("names are bounded");
    for tensor in &mut tensors {
        let key = &keys[tensor.key as usize];
        tensor.name = match key.elements() == Some(tensor.elements) {
            true => key.name.clone(),
            false => part_name(&key.name, &separator, tensor.first),
        };
    }
    (tensors, sources)
}

fn part_name(key: &str, separator: &str, first: u64) -> String {
    format!("{key}{separator}{first}")
}

fn clear(path: &Path, hub: u32) {
    let Ok(entries) = std::fs::read_dir(path) else { return };
    let mine = format!("hub-{hub}.");
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(&mine) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    // This fails if others have written to the folder.
    let _ = std::fs::remove_dir(path);
}

pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use paramhub_core::auth::Namespace;

    #[test]
    fn a_hub_whose_part_has_failed_leaves_the_folder_to_those_that_have_begun() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = JobFolder::new(scratch.path(), "job");
        let path = folder.of_step(7, Namespace([1; 16]));
        for hub in [0, 1] {
            begin(&folder, &path, hub).unwrap();
        }
        clear(&path, 1);
        write_whole(&manifest_of(&path, 0), "{}").unwrap();
        clear(&path, 0);
        assert!(!path.exists(), "the last one removes it");
        begin(&folder, &path, 1).unwrap();
    }
}
