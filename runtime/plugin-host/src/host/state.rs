//! `warp:job/state`: what handlers share, by bucket.
//!
//! What must stay true: a bucket that the manifest does not ask for or the operator did not grant does not exist
//! for the guest, and a bucket that demands a mutex is written by nobody who holds no slot.

use std::sync::Arc;

use warp_pipeline::{StateFault, StateOp, StateReply};

use super::bindings::warp::job::state::{Error, Host};
use super::{HostState, no_nul};
use crate::limits::Refused;
use crate::permissions::Bucket;

type Answer<T> = wasmtime::Result<Result<T, Error>>;

impl HostState {
    async fn state_call(&mut self, bucket: &str, key: String, op: StateOp) -> Answer<StateReply> {
        let Some(granted) = self.permissions.buckets.iter().find(|granted| granted.name == bucket) else {
            return Ok(Err(Error::Denied(format!(
                "bucket `{}` is not granted; the manifest asks for it with `state = [{{ bucket = \"…\" }}]`",
                bucket.chars().take(60).collect::<String>()
            ))));
        };
        let Bucket { name, under_mutex, at_once } = granted.clone();
        no_nul("a key of shared state", &key)?;
        if let Some(error) = too_large("key", key.len(), self.caps.state_key_bytes) {
            return Ok(Err(error));
        }
        for value in values(&op) {
            no_nul("a value of shared state", value)?;
            if let Some(error) = too_large("value", value.len(), self.caps.state_value_bytes) {
                return Ok(Err(error));
            }
        }
        if under_mutex && !matches!(op, StateOp::Get) && !self.calls.holds_slot() {
            return Err(wasmtime::Error::new(Refused::NoSlot { bucket: name }));
        }
        let calls = Arc::clone(&self.calls);
        let reply = match &self.home {
            None => calls.state(&name, &key, op, at_once).await,
            Some(home) => {
                let open = home.open.clone();
                let task = home.runtime.spawn(async move {
                    let reply = calls.state(&name, &key, op, at_once).await;
                    drop(open);
                    reply
                });
                match AbortOnDrop(task).join().await {
                    Ok(reply) => reply,
                    Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
                    Err(_) => Err(StateFault::Unavailable("the host is stopping".to_owned())),
                }
            }
        };
        Ok(reply.map_err(|fault| match fault {
            StateFault::NotANumber(why) => Error::NotANumber(why),
            StateFault::TooLarge(why) => Error::TooLarge(why),
            StateFault::Unavailable(why) => Error::Unavailable(why),
        }))
    }
}

/// A guest that is stopped in the middle of a call must not leave it running. The abort is only a request; the
/// run ends when the call has let go of its [`super::Home::open`].
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> AbortOnDrop<T> {
    async fn join(mut self) -> Result<T, tokio::task::JoinError> {
        (&mut self.0).await
    }
}

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn values(op: &StateOp) -> impl Iterator<Item = &String> {
    let (first, second) = match op {
        StateOp::Get | StateOp::Add(_) => (None, None),
        StateOp::Put(value) => (value.as_ref(), None),
        StateOp::CompareAndSet { expected, value } => (expected.as_ref(), value.as_ref()),
    };
    first.into_iter().chain(second)
}

fn too_large(what: &str, bytes: usize, cap: usize) -> Option<Error> {
    (bytes > cap).then(|| Error::TooLarge(format!("the {what} has {bytes} bytes; {cap} are allowed")))
}

fn value_of(reply: StateReply) -> Option<String> {
    match reply {
        StateReply::Value(value) => value,
        StateReply::Differs => None,
    }
}

impl Host for HostState {
    async fn get(&mut self, bucket: String, key: String) -> Answer<Option<String>> {
        Ok(self.state_call(&bucket, key, StateOp::Get).await?.map(value_of))
    }

    async fn set(&mut self, bucket: String, key: String, value: String) -> Answer<()> {
        Ok(self.state_call(&bucket, key, StateOp::Put(Some(value))).await?.map(drop))
    }

    async fn remove(&mut self, bucket: String, key: String) -> Answer<()> {
        Ok(self.state_call(&bucket, key, StateOp::Put(None)).await?.map(drop))
    }

    async fn compare_and_set(&mut self, bucket: String, key: String, expected: Option<String>, value: Option<String>) -> Answer<bool> {
        let op = StateOp::CompareAndSet { expected, value };
        Ok(self.state_call(&bucket, key, op).await?.map(|reply| reply != StateReply::Differs))
    }

    async fn add(&mut self, bucket: String, key: String, amount: String) -> Answer<String> {
        let Ok(number) = amount.parse::<i128>() else {
            let shown: String = amount.chars().take(60).collect();
            return Ok(Err(Error::NotANumber(format!("`{shown}` is not a decimal integer"))));
        };
        // A sum always has a value; an absent one would be a defect of the store and reads as zero.
        let reply = self.state_call(&bucket, key, StateOp::Add(number)).await?;
        Ok(reply.map(|reply| value_of(reply).unwrap_or_else(|| "0".to_owned())))
    }
}
