//! Work beside the executor's threads.

use paramhub_core::service::{ErrorCode, ServiceError};

use crate::error::refusal;

/// Runs long or blocking work beside the executor's threads.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ServiceError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| broken())
}

/// The refusal of a call at which the manager itself has panicked.
pub(crate) fn broken() -> ServiceError {
    refusal(ErrorCode::Internal, "the connection manager failed at this request; its log says why")
}
