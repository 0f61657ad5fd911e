//! Codecs that lose a part of every value and keep the loss for the next time. Three are built in; a program may register
//! more.

use std::sync::{Mutex, OnceLock, PoisonError};

use thiserror::Error;

use super::Codec;

/// The most elements that a block of a quantised payload may have.
pub const BLOCK_ELEMENTS_MAX: usize = 1024;

/// The numbers from this one to 254 are for codecs that programs register; lower ones are for the built-in codecs.
pub const REGISTERED_NUMBERS_FROM: u8 = 128;

/// The form of a quantised payload: blocks of elements, each with a head of some bytes that its elements have in common,
/// such as a scale.
///
/// The payload begins with the heads of all blocks. The elements follow, side by side, the first one in the lowest bits of
/// the first byte. The last block may have fewer elements than the others.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct QuantisedFormat {
    /// The name by which jobs ask for the codec: lower-case letters, digits and dashes.
    pub name: &'static str,
    /// Its number in frames, from [`REGISTERED_NUMBERS_FROM`] to 254. It must be the same in all processes of a job.
    pub number: u8,
    /// Elements of a block: a multiple of 8, at most [`BLOCK_ELEMENTS_MAX`].
    pub block_elements: usize,
    /// Bytes of a block's head, at least one, at most as many as the block has elements.
    pub head_bytes: usize,
    /// Bits of an element, 1 to 16.
    pub element_bits: usize,
    /// As the codec of a whole job, it applies to keys of two dimensions only, and the others travel in their own type.
    pub matrices_only: bool,
}

/// The arithmetic of a [`QuantisedFormat`], block by block.
///
/// The caller keeps what is lost: it encodes values plus the loss of earlier ones, and subtracts what a receiver will
/// decode. So a codec is nothing but a function from values to bytes and back.
///
/// ```
/// use paramhub_core::codec::{Codec, QuantisedCodec, QuantisedFormat, register};
///
/// /// The sign of each value, times the block's mean magnitude.
/// struct Signs;
///
/// static FORMAT: QuantisedFormat = QuantisedFormat {
///     name: "signs",
///     number: 200,
///     block_elements: 512,
///     head_bytes: 4,
///     element_bits: 1,
///     matrices_only: true,
/// };
///
/// impl QuantisedCodec for Signs {
///     fn format(&self) -> &'static QuantisedFormat {
///         &FORMAT
///     }
///
///     fn encode(&self, values: &[f32], head: &mut [u8], elements: &mut [u8]) {
///         let mean = values.iter().map(|value| value.abs()).sum::<f32>() / values.len() as f32;
///         head.copy_from_slice(&mean.to_le_bytes());
///         for (byte, eight) in elements.iter_mut().zip(values.chunks(8)) {
///             *byte = (0..).zip(eight).map(|(bit, value)| u8::from(*value < 0.0) << bit).sum();
///         }
///     }
///
///     fn decode(&self, head: &[u8], elements: &[u8], out: &mut [f32]) {
///         let mean = f32::from_le_bytes(head.try_into().unwrap());
///         for (byte, eight) in elements.iter().zip(out.chunks_mut(8)) {
///             for (bit, value) in (0..).zip(eight) {
///                 *value = if byte >> bit & 1 == 1 { -mean } else { mean };
///             }
///         }
///     }
///
///     fn is_finite(&self, head: &[u8]) -> bool {
///         f32::from_le_bytes(head.try_into().unwrap()).is_finite()
///     }
/// }
///
/// let codec = register(&Signs).unwrap();
/// assert_eq!("signs".parse(), Ok(codec));
/// assert_eq!(codec.payload_bytes(8192), 16 * 4 + 1024);
/// ```
pub trait QuantisedCodec: Send + Sync {
    /// The form of its payloads.
    fn format(&self) -> &'static QuantisedFormat;

    /// Encodes the values of one block, at most [`block_elements`](QuantisedFormat::block_elements). Writes all of `head`, which
    /// has [`head_bytes`](QuantisedFormat::head_bytes) bytes, and all of `elements`, which has as many as the values need.
    ///
    /// The same values must give the same bytes in every process of a job. A value that is NaN or infinite must make
    /// [`is_finite`](Self::is_finite) false for the head.
    fn encode(&self, values: &[f32], head: &mut [u8], elements: &mut [u8]);

    /// Encodes one block, and writes to `decoded` what [`decode`](Self::decode) makes of it. A codec that has these values
    /// anyway does both at once.
    fn encode_and_decode(&self, values: &[f32], head: &mut [u8], elements: &mut [u8], decoded: &mut [f32]) {
        self.encode(values, head, elements);
        self.decode(head, elements, decoded);
    }

    /// Decodes one block. It must accept all bytes: they may come from a faulty peer.
    fn decode(&self, head: &[u8], elements: &[u8], out: &mut [f32]);

    /// Returns whether all values of a block with this head are finite.
    fn is_finite(&self, head: &[u8]) -> bool;
}

/// The reason why a codec is not registered.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RegisterCodecError {
    /// The name is taken.
    #[error("a codec called `{0}` exists already: choose another name")]
    Name(&'static str),
    /// The number is taken.
    #[error("codec `{name}`: `{other}` has the number {number} already: choose another from 128 to 254")]
    Number {
        /// The codec's name.
        name: &'static str,
        /// Its number.
        number: u8,
        /// The codec that has the number.
        other: &'static str,
    },
    /// The format cannot be.
    #[error("codec `{name}`: {what}")]
    Format {
        /// The codec's name.
        name: &'static str,
        /// What is wrong, and what to do.
        what: &'static str,
    },
}

/// There is no number 255: in digests it stands for no codec.
const REGISTERED_MAX: usize = 255 - REGISTERED_NUMBERS_FROM as usize;

/// The registered codecs by their numbers. Frames are read by them, so a look-up must not lock.
static REGISTERED: [OnceLock<&dyn QuantisedCodec>; REGISTERED_MAX] =
    [const { OnceLock::new() }; REGISTERED_MAX];

/// Makes a codec known to this process by its name and its number. Names of codecs are read in many places: settings, flags,
/// files and frames. So there is one register for the process, unlike that of optimizers. Every process that reads the
/// settings of a job must know its codecs: workers, hubs and the connection manager.
///
/// # Errors
/// If the name or the number is taken, or the format breaks one of its bounds; nothing has changed then.
pub fn register(codec: &'static dyn QuantisedCodec) -> Result<Codec, RegisterCodecError> {
    static REGISTERING: Mutex<()> = Mutex::new(());
    let format = codec.format();
    format.check()?;
    let _guard = REGISTERING.lock().unwrap_or_else(PoisonError::into_inner);
    if Codec::all().any(|other| other.name() == format.name) {
        return Err(RegisterCodecError::Name(format.name));
    }
    let place = &REGISTERED[usize::from(format.number - REGISTERED_NUMBERS_FROM)];
    if let Some(other) = place.get() {
        let (name, number, other) = (format.name, format.number, other.format().name);
        return Err(RegisterCodecError::Number { name, number, other });
    }
    place.get_or_init(|| codec);
    Ok(Codec::Quantised(format))
}

/// The registered codec with this number, if there is one.
pub fn registered(number: u8) -> Option<&'static dyn QuantisedCodec> {
    let place = number.checked_sub(REGISTERED_NUMBERS_FROM)?;
    REGISTERED.get(usize::from(place))?.get().copied()
}

/// All registered codecs.
pub(super) fn all_registered() -> impl Iterator<Item = Codec> {
    REGISTERED.iter().filter_map(OnceLock::get).map(|codec| Codec::Quantised(codec.format()))
}

impl QuantisedFormat {
    /// Bytes of all heads of a payload of this many elements.
    pub const fn heads_bytes(&self, elements: usize) -> usize {
        elements.div_ceil(self.block_elements) * self.head_bytes
    }

    /// Bytes of a payload of this many elements.
    pub const fn payload_bytes(&self, elements: usize) -> usize {
        self.heads_bytes(elements) + (elements * self.element_bits).div_ceil(8)
    }

    fn check(&self) -> Result<(), RegisterCodecError> {
        let is_plain = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
        let bounds = [
            (
                !self.name.is_empty() && self.name.bytes().all(is_plain),
                "a name has lower-case letters, digits and dashes, at least one",
            ),
            (
                (REGISTERED_NUMBERS_FROM..u8::MAX).contains(&self.number),
                "numbers below 128 are for the built-in codecs, and 255 stands for none: choose one from 128 to 254",
            ),
            (
                (8..=BLOCK_ELEMENTS_MAX).contains(&self.block_elements)
                    && self.block_elements.is_multiple_of(8),
                "a block has a multiple of 8 elements, from 8 to 1024",
            ),
            (
                (1..=self.block_elements).contains(&self.head_bytes),
                "a head has at least one byte, and at most as many bytes as its block has elements",
            ),
            ((1..=16).contains(&self.element_bits), "an element has 1 to 16 bits"),
        ];
        match bounds.into_iter().find(|(holds, _)| !holds) {
            Some((_, what)) => Err(RegisterCodecError::Format { name: self.name, what }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing(&'static QuantisedFormat);

    impl QuantisedCodec for Nothing {
        fn format(&self) -> &'static QuantisedFormat {
            self.0
        }

        fn encode(&self, _: &[f32], _: &mut [u8], _: &mut [u8]) {}

        fn decode(&self, _: &[u8], _: &[u8], out: &mut [f32]) {
            out.fill(0.0);
        }

        fn is_finite(&self, _: &[u8]) -> bool {
            true
        }
    }

    fn try_register(format: QuantisedFormat) -> Result<Codec, String> {
        let codec = Box::leak(Box::new(Nothing(Box::leak(Box::new(format)))));
        register(codec).map_err(|error| error.to_string())
    }

    fn four_bits(name: &'static str, number: u8) -> QuantisedFormat {
        QuantisedFormat {
            name,
            number,
            block_elements: 64,
            head_bytes: 2,
            element_bits: 4,
            matrices_only: false,
        }
    }

    #[test]
    fn a_registered_codec_is_known_by_its_name_and_its_number() {
        let unknown = "four-bits".parse::<Codec>().unwrap_err();
        assert!(unknown.contains("expected f32, f16, bf16, one-bit, two-bit, int8"), "{unknown}");
        assert_eq!((Codec::from_wire(131), registered(131).is_some()), (None, false));
        let codec = try_register(four_bits("four-bits", 131)).unwrap();
        assert_eq!(("four-bits".parse(), Codec::from_wire(131)), (Ok(codec), Some(codec)));
        assert_eq!((codec.number(), codec.is_quantised()), (131, true));
        assert_eq!(serde_json::from_str::<Codec>("\"four-bits\"").unwrap(), codec);
        assert_eq!(serde_json::to_string(&codec).unwrap(), "\"four-bits\"");
        assert_eq!([1, 64, 65].map(|elements| codec.payload_bytes(elements)), [3, 34, 37]);
        assert!("five-bits".parse::<Codec>().unwrap_err().contains("four-bits"));
        let from_elsewhere = serde_json::from_str::<Codec>("\"five-bits\"").unwrap_err().to_string();
        assert!(from_elsewhere.contains("this one must register it, too"), "{from_elsewhere}");
        assert_eq!(registered(131).unwrap().format().name, "four-bits");

        let twice = try_register(four_bits("four-bits", 132)).unwrap_err();
        assert!(twice.contains("`four-bits` exists already"), "{twice}");
        let taken = try_register(four_bits("quarters", 131)).unwrap_err();
        assert!(taken.contains("`four-bits` has the number 131"), "{taken}");
        assert!("quarters".parse::<Codec>().is_err());
    }

    #[test]
    fn a_format_out_of_bounds_is_refused_by_the_bound() {
        let usual = || four_bits("unusual", 140);
        for (format, bound) in [
            (QuantisedFormat { name: "", ..usual() }, "a name has"),
            (QuantisedFormat { name: "Four", ..usual() }, "a name has"),
            (QuantisedFormat { name: "int8", ..usual() }, "exists already"),
            (QuantisedFormat { name: "f32", ..usual() }, "exists already"),
            (QuantisedFormat { number: 127, ..usual() }, "from 128 to 254"),
            (QuantisedFormat { number: 255, ..usual() }, "from 128 to 254"),
            (QuantisedFormat { block_elements: 0, ..usual() }, "multiple of 8"),
            (QuantisedFormat { block_elements: 12, ..usual() }, "multiple of 8"),
            (QuantisedFormat { block_elements: 1032, ..usual() }, "multiple of 8"),
            (QuantisedFormat { head_bytes: 65, ..usual() }, "at most as many bytes"),
            (QuantisedFormat { head_bytes: 0, ..usual() }, "at least one byte"),
            (QuantisedFormat { element_bits: 0, ..usual() }, "1 to 16 bits"),
            (QuantisedFormat { element_bits: 17, ..usual() }, "1 to 16 bits"),
        ] {
            let shown = format!("{format:?}");
            let refused = try_register(format).unwrap_err();
            assert!(refused.contains(bound), "{shown}: {refused}");
        }
        assert_eq!(Codec::from_wire(140), None);
    }
}
