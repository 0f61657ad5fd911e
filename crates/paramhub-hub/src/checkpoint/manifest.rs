//! The description of a hub's part of a checkpoint, in the file that makes the part count.

use paramhub_core::auth::Namespace;
use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::key::{Key, KeyTable};
use serde::{Deserialize, Serialize};

/// The format that is written, and the only one that is read.
pub(super) const FORMAT: u32 = 1;

const HEAD: &str = "{\"blake3\":\"";
const MIDDLE: &str = "\",\"manifest\":";
const TAIL: &str = "}\n";
/// Hexadecimal digits of a digest.
const DIGEST: usize = 64;

/// The manifest of a hub's part of a checkpoint. All parts of one job and step, if they have every element
/// together, are a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// 1, the only format.
    pub format: u32,
    /// The job's name.
    pub job: String,
    /// The job's namespace; several jobs can have a name one after another.
    pub namespace: Namespace,
    /// The number of the hub that wrote it, among the job's hubs.
    pub hub: u32,
    /// The version of every chunk. If workers take no steps together: the steps to which all of them had
    /// contributed in all of this part.
    pub step: u32,
    /// `true` if all chunks have exactly this version.
    pub is_consistent: bool,
    /// The run's generation, which is higher than those of the runs before it. It decides which checkpoint is
    /// newer, whatever the clock did. Manifests of old releases that have none are read as generation 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub generation: u64,
    /// The time at which it was written, in milliseconds since the Unix epoch.
    pub written_ms: u64,
    /// Number of ranks of the job.
    pub workers: u32,
    /// The optimizer's name.
    pub optimizer: String,
    /// The hyperparameters of each group for the next step, as far as this hub knew them, for people to read.
    pub hyperparameters: Vec<Hyperparameters>,
    /// The same hyperparameters in their wire form, in hexadecimal. These are read, since JSON may change the
    /// last bit of a number.
    pub(super) exact: Vec<String>,
    /// Values of optimizer state per parameter.
    pub state_slots: usize,
    /// The job's key table.
    pub keys: KeyTable,
    /// The files of this part, in the same folder.
    pub files: Vec<FileEntry>,
    /// The tensors in the files, in order.
    pub tensors: Vec<TensorEntry>,
    /// The program states with which ranks go on from this step, one behind the other in a file of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub program_states: Vec<ProgramStateEntry>,
}

/// A file of tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// The file's name in the manifest's folder.
    pub name: String,
    /// The kind of its tensors.
    pub holds: TensorContents,
    /// Its length.
    pub bytes: u64,
    /// The digest of all its bytes.
    pub blake3: String,
}

/// The kind of a file's tensors. A reader that does not know a kind refuses the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorContents {
    /// Parameters: one tensor for each entry of [`Manifest::tensors`].
    Parameters,
    /// Optimizer state: one tensor for each entry and slot.
    State,
    /// The parameters that ranks have: one tensor for each entry that [is
    /// quantised](TensorEntry::is_quantised). Their difference to the parameters is what the codec has yet to
    /// feed back.
    Received,
}

/// A key, or a part of one that this hub has without a gap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The name in the parameters' file.
    pub name: String,
    /// Position in the key table.
    pub key: u32,
    /// Its first element in the key.
    pub first: u64,
    /// Number of its elements.
    pub elements: u64,
    /// Runs of elements from the first on: the number of elements, their version, and the updates that their
    /// state has had.
    pub updates: Vec<(u64, u32, u64)>,
    /// `true` if answers are quantised, so that the ranks' parameters are in a file of their own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_quantised: bool,
}

/// The program state of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramStateEntry {
    /// The rank.
    pub rank: u32,
    /// Its length.
    pub bytes: u64,
    /// The digest of its bytes.
    pub blake3: String,
}

impl TensorEntry {
    /// The name of the tensor of a slot of its state.
    pub fn state_name(&self, slot: usize) -> String {
        format!("state.{slot}.{}", self.name)
    }
}

impl Manifest {
    /// The text of the file, with a digest of itself.
    pub fn encode(&self) -> String {
        let exact = self.hyperparameters.iter().map(|values| hex(&values.to_wire())).collect();
        let body =
            serde_json::to_string(&Manifest { exact, ..self.clone() }).expect("a manifest is plain data");
        let digest = blake3::hash(body.as_bytes()).to_hex();
        format!("{HEAD}{digest}{MIDDLE}{body}{TAIL}")
    }

    /// Reads the text of such a file, or returns what is wrong with it.
    pub fn decode(file: &str) -> Result<Manifest, String> {
        #[derive(Deserialize)]
        struct AnyFormat {
            format: u32,
        }

        let torn = || "it is torn, or no manifest".to_string();
        let rest = file.strip_prefix(HEAD).and_then(|rest| rest.strip_suffix(TAIL)).ok_or_else(torn)?;
        let (digest, rest) = rest.split_at_checked(DIGEST).ok_or_else(torn)?;
        let body = rest.strip_prefix(MIDDLE).ok_or_else(torn)?;
        if blake3::hash(body.as_bytes()).to_hex().as_str() != digest {
            return Err("its digest is not that of its contents: it has been damaged".into());
        }
        let AnyFormat { format } = serde_json::from_str(body).map_err(|error| error.to_string())?;
        if format != FORMAT {
            return Err(format!(
                "it is of format {format}, which this release, of format {FORMAT}, cannot read"
            ));
        }
        let mut manifest: Manifest = serde_json::from_str(body).map_err(|error| error.to_string())?;
        let exact = manifest.exact.drain(..).map(|text| Hyperparameters::from_wire(&from_hex(&text)?));
        let exact: Option<Vec<Hyperparameters>> = exact.collect();
        manifest.hyperparameters = exact
            .filter(|exact| exact.len() == manifest.hyperparameters.len())
            .ok_or("its hyperparameters cannot be read")?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Refuses contents that its writer would not have written.
    fn check(&self) -> Result<(), String> {
        for tensor in &self.tensors {
            let key = self.keys.keys().get(tensor.key as usize);
            let fits = key.and_then(Key::elements).is_some_and(|elements| {
                tensor.elements > 0
                    && tensor.first.checked_add(tensor.elements).is_some_and(|end| end <= elements)
            });
            let counted =
                tensor.updates.iter().try_fold(0_u64, |sum, (elements, ..)| sum.checked_add(*elements));
            if !fits || counted != Some(tensor.elements) {
                return Err(format!("its tensor `{}` does not fit its own key table", tensor.name));
            }
        }
        let local = |name: &str| !name.is_empty() && !name.contains('/') && !name.starts_with('.');
        match self.files.iter().find(|file| !local(&file.name)) {
            Some(file) => Err(format!("its file {:?} is not one beside it", file.name)),
            None => Ok(()),
        }
    }

    /// The name of the file of program states.
    pub(super) fn program_states_name(&self) -> String {
        format!("hub-{}.program-states", self.hub)
    }

    /// Bytes of its files.
    pub fn bytes(&self) -> u64 {
        let of_files: u64 = self.files.iter().map(|file| file.bytes).sum();
        of_files + self.program_states.iter().map(|state| state.bytes).sum::<u64>()
    }
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex<const BYTES: usize>(text: &str) -> Option<[u8; BYTES]> {
    let digits = text.as_bytes();
    let mut bytes = [0; BYTES];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok()?;
    }
    (digits.len() == 2 * BYTES).then_some(bytes)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn manifest() -> Manifest {
        Manifest {
            format: FORMAT,
            job: "run/a".into(),
            namespace: Namespace([7; 16]),
            hub: 0,
            step: 12,
            is_consistent: true,
            generation: 3,
            written_ms: 1,
            workers: 2,
            optimizer: "sgd".into(),
            hyperparameters: vec![Hyperparameters { learning_rate: 0.1 + 0.2, ..Default::default() }],
            exact: Vec::new(),
            state_slots: 1,
            keys: KeyTable::new(vec![Key::new("w", [10])]).unwrap(),
            files: vec![FileEntry {
                name: "hub-0.safetensors".into(),
                holds: TensorContents::Parameters,
                bytes: 5,
                blake3: "00".into(),
            }],
            program_states: vec![ProgramStateEntry { rank: 1, bytes: 3, blake3: "00".into() }],
            tensors: vec![TensorEntry {
                name: "w".into(),
                key: 0,
                first: 0,
                elements: 10,
                updates: vec![(10, 12, 12)],
                is_quantised: false,
            }],
        }
    }

    #[test]
    fn a_manifest_survives_its_file_and_damage_is_reported() {
        let manifest = manifest();
        let file = manifest.encode();
        assert_eq!(Manifest::decode(&file), Ok(manifest.clone()), "to the last bit of every number");
        assert!(serde_json::from_str::<serde_json::Value>(&file).unwrap()["manifest"]["step"] == 12);
        for end in 0..file.len() {
            assert!(Manifest::decode(&file[..end]).is_err(), "torn after {end}");
        }
        for at in 0..file.len() {
            let mut bytes = file.clone().into_bytes();
            bytes[at] ^= 1;
            if let Ok(text) = String::from_utf8(bytes) {
                assert!(Manifest::decode(&text).is_err(), "flipped at {at}");
            }
        }
        // The form that releases without generations wrote.
        let old = Manifest { generation: 0, ..manifest.clone() };
        assert!(!old.encode().contains("generation"));
        assert_eq!(Manifest::decode(&old.encode()), Ok(old));
        let other = Manifest { format: 2, ..manifest.clone() };
        assert!(Manifest::decode(&other.encode()).unwrap_err().contains("format 2"));
        let mut beyond = manifest.clone();
        beyond.tensors[0].elements = 11;
        assert!(Manifest::decode(&beyond.encode()).unwrap_err().contains("key table"));
        let mut outside = manifest;
        outside.files[0].name = "../x".into();
        assert!(Manifest::decode(&outside.encode()).unwrap_err().contains("beside"));
    }
}
