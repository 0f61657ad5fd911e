//! Bounds that every side enforces before it allocates or waits; docs/protocol.md lists them for other implementers.

/// Seconds within which a stream must be opened again over another interface, in a job whose streams may move.
pub const RESUME_S: u64 = 10;
/// The least `dead_after_s` of such a job. A worker must not count as dead while the loss of its stream is
/// noticed and the stream is resumed.
pub const RESUME_DEAD_AFTER_S_MIN: f64 = 15.0;
/// The default of `redial_grace_s`: the seconds for which a hub waits for a worker whose stream was cut. A worker whose
/// process has died costs the others at most this.
pub const REDIAL_GRACE_S: f64 = 0.5;
/// The most seconds for which a hub waits so.
pub const REDIAL_GRACE_S_MAX: f64 = 60.0;
/// Workers in one job. Ranks travel as `u32`; the hub keeps eight bytes per chunk and rank.
pub const WORKERS_MAX: u32 = 1024;
/// The largest weight of a job: shares of a core that differ by more than a factor of a hundred cannot be
/// distinguished.
pub const WEIGHT_MAX: u32 = 100;
/// The largest number of steps from one to which a job can go back to the next: so many are repeated at most.
pub const REWIND_EVERY_MAX: u32 = 1000;
/// Bytes of one program state. A rank keeps its data position, its random numbers and the like in it, and a hub keeps
/// three for each rank.
pub const PROGRAM_STATE_BYTES_MAX: u32 = 64 << 20;
/// Keys in one job's table.
pub const KEYS_MAX: usize = 1 << 20;
/// Bytes of a key's name.
pub const KEY_NAME_BYTES_MAX: usize = 512;
/// Dimensions of a key's shape.
pub const KEY_DIMENSIONS_MAX: usize = 16;
/// Elements of one key: 4 TiB of f32.
pub const KEY_ELEMENTS_MAX: u64 = 1 << 40;
/// Groups of keys with their own hyperparameters: a hub keeps a schedule of 21 KiB for each.
pub const GROUPS_MAX: usize = 1024;
/// Layers that a job's settings may name: every node keeps a plan of about 200 bytes for each.
pub const LAYERS_MAX: usize = 1 << 16;
/// Numbers in the factors of one layer that one worker sends to a hub in a step. At 16 GiB of f32, factors no
/// longer save anything, and 32 bits number their pieces.
pub const FACTOR_ELEMENTS_MAX: u64 = u32::MAX as u64;
/// Properties of the information book in one query.
pub const PROPERTIES_MAX: usize = 64;
/// Bytes of a job's name.
pub const JOB_NAME_BYTES_MAX: usize = 128;
/// Smallest chunk: below it headers and system calls outweigh the data.
pub const CHUNK_BYTES_MIN: u32 = 1 << 10;
/// Largest chunk: every stream keeps room for one.
pub const CHUNK_BYTES_MAX: u32 = 1 << 24;
/// PHub's default (section 3.2.3, figure 16).
pub const CHUNK_BYTES_DEFAULT: u32 = 32 << 10;
/// Values of optimizer state per parameter: the hub keeps the number of the one that a rank has asked for in
/// a byte.
pub const STATE_SLOTS_MAX: usize = u8::MAX as usize;
/// Updates that restored optimizer state may have had: low enough that further updates cannot overflow the
/// count.
pub const STATE_UPDATES_MAX: u64 = 1 << 48;
/// Payload bytes of a frame that carries no tensor data.
pub const CONTROL_BYTES_MAX: u32 = 2048;
/// Bytes of a human-readable message inside a control frame or a handshake verdict.
pub const MESSAGE_BYTES_MAX: usize = 1024;
/// Interfaces of one hub.
pub const INTERFACES_MAX: usize = 64;
/// Cores of one hub.
pub const CORES_MAX: usize = 1024;
/// Hubs of one job.
pub const HUBS_MAX: usize = 1024;
/// Routes (hub, interface, core) of one job.
pub const ROUTES_MAX: usize = u16::MAX as usize;
/// Bytes of one request body to the connection manager: a full key table fits.
pub const REQUEST_BYTES_MAX: usize = 512 << 20;
