//! The worker's client: a job handle whose Push, Pull and PushPull move tensors through a hub.
