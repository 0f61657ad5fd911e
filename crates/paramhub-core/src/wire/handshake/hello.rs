use super::{
    Capabilities, Challenge, HandshakeError, MAGIC, VERSION, VERSION_OLDEST, bytes, u16_at, u32_at, u64_at,
    version_1,
};
use crate::auth::{Incarnation, Namespace};

/// Bytes of a [`Hello`] of version 2.
pub const HELLO_BYTES: usize = 144;
/// Bytes that tell the [length](hello_length) of a Hello.
pub const HELLO_HEAD_BYTES: usize = 8;
/// Bytes that a Hello of a later version may have.
pub const HELLO_BYTES_MAX: usize = 512;

const SHARES_PARAMETERS: u8 = 1;

/// The process that opens a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// A worker of the job.
    Worker {
        /// Its rank.
        rank: u32,
        /// `true` if it reads parameters from the arena that all workers of its host share; on local streams
        /// only.
        shares_parameters: bool,
    },
    /// A hub of a site below or beside the called one.
    Hub {
        /// The site.
        site: u16,
        /// The caller's route whose sums come on this stream.
        route: u16,
    },
    /// A hub that probes the network: bytes without frames follow.
    Prober,
}

/// The position of a stream among those that one caller has opened to one route, one after the other. A
/// newer stream replaces an older one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// A stream of protocol version 2 or later.
    Numbered {
        /// The epoch of the job in which the caller takes part.
        epoch: u64,
        /// 0 for the first stream, which replaces none.
        number: u32,
    },
    /// A stream of version 1, which has no numbers.
    Unnumbered {
        /// `true` if it replaces a stream that the caller lost.
        resumes: bool,
    },
}

impl Attempt {
    /// The first stream of an epoch.
    pub fn first(epoch: u64) -> Attempt {
        Attempt::Numbered { epoch, number: 0 }
    }

    /// Whether the stream replaces one that the caller had on this route and lost.
    pub fn resumes(self) -> bool {
        matches!(self, Attempt::Numbered { number: 1.., .. } | Attempt::Unnumbered { resumes: true })
    }
}

/// The first message on a stream, from a worker or from a hub of another site.
///
/// ```text
///   0      4       6        8        9       10       12        16        20       24    26     28
///   +------+-------+--------+--------+-------+--------+---------+---------+--------+-----+------+------+
///   | PHUB |   2   | length | caller | flags | oldest | offered | require | number | if  | core | alt  |
///   +------+-------+--------+--------+-------+--------+---------+---------+--------+-----+------+------+
///   32      40        44     48          64            80               112         144
///   +-------+---------+------+-----------+-------------+----------------+-----------+
///   | epoch | attempt | zero | namespace | incarnation | placement hash | challenge |
///   +-------+---------+------+-----------+-------------+----------------+-----------+
/// ```
/// `number` is a worker's rank, or a hub's site and route, 16 bits each. `alt` are 16 bits, the number of
/// [`standby_route`](Hello::standby_route) plus one or zero, and 16 bits of zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The caller of the stream.
    pub caller: Caller,
    /// Position of the interface in its hub.
    pub interface: u16,
    /// Core of the hub.
    pub core: u16,
    /// The route, at a hub that is not its own in the placement: its standby, or the hub that has taken over.
    pub standby_route: Option<u16>,
    /// The capabilities that the caller has.
    pub offered: Capabilities,
    /// Those among them without which the caller cannot go on.
    pub required: Capabilities,
    /// The job's epoch, and the stream's number among those of its caller to this route.
    pub attempt: Attempt,
    /// The job, or the probe.
    pub namespace: Namespace,
    /// The incarnation given to ConnectService; zeros from a hub.
    pub incarnation: Incarnation,
    /// Digest of the placement that the caller computed: a worker's of its site, a hub's of all sites.
    pub placement: [u8; 32],
    /// The challenge that the hub must answer.
    pub challenge: Challenge,
}

/// Bytes of the Hello that begins with `head`.
///
/// # Errors
/// If no Hello begins so.
pub fn hello_length(head: &[u8; HELLO_HEAD_BYTES]) -> Result<usize, HandshakeError> {
    if head[0..4] != MAGIC {
        return Err(HandshakeError::Magic);
    }
    let (version, length) = (u16_at(head, 4), u16_at(head, 6));
    match (version, usize::from(length)) {
        (0, _) => Err(HandshakeError::CallerVersion { oldest: 0, newest: 0 }),
        // The flags of version 1 were here.
        (1, _) => Ok(version_1::HELLO_BYTES),
        (2, HELLO_BYTES) => Ok(HELLO_BYTES),
        (3.., HELLO_BYTES..=HELLO_BYTES_MAX) => Ok(usize::from(length)),
        _ => Err(HandshakeError::Length(length)),
    }
}

impl Hello {
    /// The wire form.
    ///
    /// # Panics
    /// If the attempt has no number: only callers of version 1 leave it out.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let Attempt::Numbered { epoch, number: attempt } = self.attempt else {
            panic!("a caller numbers its streams")
        };
        let mut wire = [0; HELLO_BYTES];
        let (kind, flags, number) = match self.caller {
            Caller::Worker { rank, shares_parameters } => {
                (0, if shares_parameters { SHARES_PARAMETERS } else { 0 }, rank)
            }
            Caller::Hub { site, route } => (1, 0, u32::from(site) << 16 | u32::from(route)),
            Caller::Prober => (3, 0, 0),
        };
        wire[0..4].copy_from_slice(&MAGIC);
        wire[4..6].copy_from_slice(&VERSION.to_le_bytes());
        wire[6..8].copy_from_slice(&(HELLO_BYTES as u16).to_le_bytes());
        (wire[8], wire[9]) = (kind, flags);
        // A hub of version 1 would not know the caller's epoch and attempt.
        wire[10..12].copy_from_slice(&VERSION.to_le_bytes());
        wire[12..16].copy_from_slice(&self.offered.0.to_le_bytes());
        wire[16..20].copy_from_slice(&self.required.0.to_le_bytes());
        wire[20..24].copy_from_slice(&number.to_le_bytes());
        wire[24..26].copy_from_slice(&self.interface.to_le_bytes());
        wire[26..28].copy_from_slice(&self.core.to_le_bytes());
        let route = self.standby_route.map_or(0, |route| route + 1);
        wire[28..30].copy_from_slice(&route.to_le_bytes());
        wire[32..40].copy_from_slice(&epoch.to_le_bytes());
        wire[40..44].copy_from_slice(&attempt.to_le_bytes());
        wire[48..64].copy_from_slice(&self.namespace.0);
        wire[64..80].copy_from_slice(&self.incarnation.0);
        wire[80..112].copy_from_slice(&self.placement);
        wire[112..144].copy_from_slice(&self.challenge);
        wire
    }

    /// Reads the wire form of any version that a hub of this release serves, and the newest version that both
    /// ends speak.
    ///
    /// # Panics
    /// If `wire` is shorter than its [length](hello_length).
    pub fn decode(wire: &[u8]) -> Result<(Hello, u16), HandshakeError> {
        let length = hello_length(&bytes(wire, 0))?;
        let newest = u16_at(wire, 4);
        if newest == 1 {
            return Ok((version_1::decode_hello(&bytes(wire, 0))?, 1));
        }
        assert!(wire.len() >= length, "the caller read the whole Hello");
        let oldest = u16_at(wire, 10);
        if oldest > VERSION || newest < VERSION_OLDEST || oldest > newest {
            return Err(HandshakeError::CallerVersion { oldest, newest });
        }
        // A later version may have given reserved bits a meaning that its callers can do without.
        let reserved = u64::from(u16_at(wire, 30)) | u64::from(u32_at(wire, 44)) << 32;
        if newest == VERSION && reserved != 0 {
            return Err(HandshakeError::Reserved(reserved));
        }
        let (kind, flags, number) = (wire[8], wire[9], u32_at(wire, 20));
        let caller = match (kind, flags) {
            (0, 0 | SHARES_PARAMETERS) => {
                Caller::Worker { rank: number, shares_parameters: flags == SHARES_PARAMETERS }
            }
            (1, 0) => Caller::Hub { site: (number >> 16) as u16, route: number as u16 },
            (3, 0) if number == 0 => Caller::Prober,
            (3, 0) => return Err(HandshakeError::Reserved(u64::from(number))),
            (0 | 1 | 3, _) => return Err(HandshakeError::Reserved(u64::from(flags))),
            _ => return Err(HandshakeError::Caller(kind)),
        };
        let hello = Hello {
            caller,
            interface: u16_at(wire, 24),
            core: u16_at(wire, 26),
            standby_route: u16_at(wire, 28).checked_sub(1),
            offered: Capabilities(u32_at(wire, 12)),
            required: Capabilities(u32_at(wire, 16)),
            attempt: Attempt::Numbered { epoch: u64_at(wire, 32), number: u32_at(wire, 40) },
            namespace: Namespace(bytes(wire, 48)),
            incarnation: Incarnation(bytes(wire, 64)),
            placement: bytes(wire, 80),
            challenge: bytes(wire, 112),
        };
        Ok((hello, VERSION))
    }
}
