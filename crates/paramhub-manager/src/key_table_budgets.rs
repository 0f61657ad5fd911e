//! The memory that key tables may take while they are read and compared, of all jobs together.

use std::sync::Arc;

use paramhub_core::limits::REQUEST_BYTES_MAX;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use crate::connection_slots::no_room;
use crate::error::Refusal;

/// The most bytes of a small key table, which waits for no large one.
const SMALL_TABLE: usize = 4 << 20;
/// KiB of small key tables that are read and compared at the same time.
const SMALL_TABLES_KIB: usize = 128 << 10;
/// KiB of large key tables that are read and compared at the same time: two of the largest. Further ones
/// wait.
const LARGE_TABLES_KIB: usize = 2 * REQUEST_BYTES_MAX / 1024;

/// The budgets of key tables that are being read and compared.
pub(crate) struct KeyTableBudgets {
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
}

impl Default for KeyTableBudgets {
    fn default() -> Self {
        KeyTableBudgets::new(SMALL_TABLES_KIB, LARGE_TABLES_KIB)
    }
}

impl KeyTableBudgets {
    pub(crate) fn new(small_kib: usize, large_kib: usize) -> Self {
        KeyTableBudgets {
            small: Arc::new(Semaphore::new(small_kib)),
            large: Arc::new(Semaphore::new(large_kib)),
        }
    }

    /// Waits for room in the budget for a table of `declared` bytes.
    pub(crate) async fn admit(
        &self,
        declared: usize,
        deadline: Instant,
    ) -> Result<OwnedSemaphorePermit, Refusal> {
        let (budget, most) = match declared <= SMALL_TABLE {
            true => (&self.small, SMALL_TABLES_KIB),
            false => (&self.large, LARGE_TABLES_KIB),
        };
        // A table that is too long is refused elsewhere. Here it must only not ask for more than the whole
        // budget.
        let share = (declared / 1024 + 1).min(most) as u32;
        match timeout_at(deadline, budget.clone().acquire_many_owned(share)).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(no_room(
                "too many key tables are on their way to the connection manager: try again".into(),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn large_key_tables_leave_room_for_small_ones() {
        let tables = KeyTableBudgets::default();
        let deadline = Instant::now() + Duration::from_secs(30);
        let _large = [
            tables.admit(REQUEST_BYTES_MAX - 1024, deadline).await.unwrap(),
            tables.admit(REQUEST_BYTES_MAX - 1024, deadline).await.unwrap(),
        ];
        let _small = tables.admit(SMALL_TABLE, deadline).await.unwrap();
        assert!(tables.admit(SMALL_TABLE + 1, Instant::now()).await.is_err());
    }
}
