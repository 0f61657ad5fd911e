//! What a job may choose of its sites.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

#[cfg(doc)]
use super::choose;
use crate::codec::Codec;
use crate::key::Key;

/// The way in which the sums of sites become those of all workers.
///
/// A worker belongs to the site of its host, if a hub serves that host; else of its rack; else of the hubs
/// that serve all. A worker that names no rack is in the rack of its host's hub. A host's site with one worker
/// is left out. Above a host's site is that of its rack or, without one, that of all; above a rack's site that
/// of all. Sites are numbered by hosts, racks and all, each in the order of their names.
///
/// - `auto` (the default): as the hubs' places say; several racks without a hub above them reduce as with
///   `sharded`. If the manager knows the rate between the racks, or its hubs have probed it, PHub's condition
///   chooses another one where that is faster. A job whose hubs have no place has one site.
/// - `flat`: one site of all hubs, except those of single hosts.
/// - `tree`: the site of all is above all others; without one, that of the first rack.
/// - `ring`, `sharded`: racks are peers, whatever serves all; the site of all takes part only if it has
///   workers.
/// - `line`: all sites that have workers are peers, in the order of their ranks, which no two sites may
///   interleave. In a reproducible job sums are bit-equal to those of `flat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// Follows from the hubs' places. The job is flat if no hub has a place. Otherwise sums go through hosts
    /// and racks, and between racks as with [`Sharded`](Self::Sharded), or through the hub that serves all
    /// racks if there is one. If the manager knows the rate of the core, or its hubs have probed it,
    /// [`choose`] decides.
    #[default]
    Auto,
    /// One site of all hubs, except those that serve a single host.
    Flat,
    /// Through hosts and racks, then to a parent: the hubs that serve all racks, else those of the first
    /// rack.
    Tree,
    /// Through hosts and racks, then round a ring of racks.
    Ring,
    /// Through hosts and racks; then each rack completes its share of the chunks.
    Sharded,
    /// From site to site in the order of ranks, each adding the gradients of its own workers.
    Line,
}

impl Reduction {
    const ALL: [Reduction; 6] = [
        Reduction::Auto,
        Reduction::Flat,
        Reduction::Tree,
        Reduction::Ring,
        Reduction::Sharded,
        Reduction::Line,
    ];
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reduction::Auto => "auto",
            Reduction::Flat => "flat",
            Reduction::Tree => "tree",
            Reduction::Ring => "ring",
            Reduction::Sharded => "sharded",
            Reduction::Line => "line",
        })
    }
}

impl FromStr for Reduction {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Reduction::ALL.into_iter().find(|reduction| reduction.to_string() == text);
        named.ok_or_else(|| {
            format!("`{text}` is no reduction: there are auto, flat, tree, ring, sharded and line")
        })
    }
}

/// The place where the optimizer runs. `every_site`: at every site, on the same global gradient, so that
/// all models are bit-identical. `owner`: at each chunk's owner, which answers with parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OptimizeAt {
    /// At every site, on the same global gradient: all models are bit-identical (PHub section 3.4).
    #[default]
    EverySite,
    /// At each chunk's owner, which answers with parameters.
    Owner,
}

impl fmt::Display for OptimizeAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OptimizeAt::EverySite => "every-site",
            OptimizeAt::Owner => "owner",
        })
    }
}

impl FromStr for OptimizeAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = [OptimizeAt::EverySite, OptimizeAt::Owner].into_iter().find(|at| at.to_string() == text);
        named.ok_or_else(|| format!("the optimizer cannot run at `{text}`: there are every-site and owner"))
    }
}

/// The encoding in which sums cross between sites. `f32`: as hubs make them. `bf16`: in half the bytes. A quantised codec: with
/// error feedback, of which each hub keeps the loss for the next step; `one-bit` and `two-bit` apply to keys of two dimensions, and
/// the others cross in f32. Sums are rounded at every site on the way to the owner; the owner rounds the sum of all workers'
/// gradients, too, so that all models stay bit-identical. There is no f16, whose range the sum of many gradients may exceed.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(try_from = "String", into = "String")]
pub struct BetweenSites(Codec);

impl BetweenSites {
    /// As hubs make them.
    pub const F32: BetweenSites = BetweenSites(Codec::F32);
    /// In half the bytes.
    pub const BF16: BetweenSites = BetweenSites(Codec::BF16);
    /// In one bit an element.
    pub const ONE_BIT: BetweenSites = BetweenSites(Codec::ONE_BIT);
    /// In two bits an element.
    pub const TWO_BIT: BetweenSites = BetweenSites(Codec::TWO_BIT);
    /// In a byte an element.
    pub const INT8: BetweenSites = BetweenSites(Codec::INT8);

    /// The codec of the sums of a key's gradients.
    pub fn codec_of(self, key: &Key) -> Codec {
        if self.0.is_for_shape(&key.shape) { self.0 } else { Codec::F32 }
    }

    /// Returns whether sums are quantised, those of all keys or of some.
    pub fn is_quantised(self) -> bool {
        self.0.is_quantised()
    }

    /// The number of the codec in frames.
    pub(super) fn number(self) -> u8 {
        self.0.number()
    }
}

impl Default for BetweenSites {
    fn default() -> Self {
        BetweenSites::F32
    }
}

impl fmt::Display for BetweenSites {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for BetweenSites {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl FromStr for BetweenSites {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(Codec::F16) => {
                Err("sums cannot cross between sites as `f16`, whose range they may exceed: use bf16".into())
            }
            Ok(codec) => Ok(BetweenSites(codec)),
            Err(unknown) => Err(format!("sums cannot cross between sites as `{text}`: {unknown}")),
        }
    }
}

impl TryFrom<String> for BetweenSites {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<BetweenSites> for String {
    fn from(sums: BetweenSites) -> String {
        sums.0.into()
    }
}
