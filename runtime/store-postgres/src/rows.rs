//! Values as rows hold them.

use std::borrow::Cow;
use std::time::Duration;

use warp_domain::HostId;
use warp_domain::ending::State;
use warp_store::StoreErrorKind;

use crate::error::Fault;

/// Metadata as its column holds it: JSON pairs in order, or nothing.
pub(crate) fn write_metadata(metadata: &[(String, String)]) -> Option<String> {
    (!metadata.is_empty()).then(|| serde_json::to_string(metadata).unwrap_or_default())
}

/// Reads what [`write_metadata`] wrote.
pub(crate) fn read_metadata(text: Option<&str>) -> Result<Vec<(String, String)>, Fault> {
    let Some(text) = text else { return Ok(Vec::new()) };
    serde_json::from_str(text).map_err(|error| Fault::said(StoreErrorKind::Internal, format!("metadata of a job: {error}")))
}

/// Text that PostgreSQL can store: a NUL character, which it cannot, is shown as a replacement character.
pub(crate) fn without_nul(text: &str) -> String {
    let text: Cow<'_, str> = if text.contains('\0') { text.replace('\0', "\u{fffd}").into() } else { text.into() };
    text.into_owned()
}

/// A number of a host as its column holds it. One that does not fit was never given.
pub(crate) fn host_number(host: HostId) -> Result<i32, Fault> {
    let lost = |_| Fault::said(StoreErrorKind::HostLost, format!("host {} is not registered", host.0));
    i32::try_from(host.0).map_err(lost)
}

/// A span in whole milliseconds.
pub(crate) fn millis(span: Duration) -> i64 {
    // Subtracted from an instant it must not wrap.
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX).min(i64::MAX / 4)
}

/// Where a job stands. The numbers are in the rows and in the conditions of partial indexes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Scheduled,
    Ready,
    Parked,
    Reserved,
    Running,
    Awaiting,
    Completed,
    Failed,
    Deleted,
}

impl Place {
    pub(crate) fn read(number: i16) -> Result<Self, Fault> {
        Ok(match number {
            0 => Place::Scheduled,
            1 => Place::Ready,
            2 => Place::Parked,
            3 => Place::Reserved,
            4 => Place::Running,
            5 => Place::Awaiting,
            10 => Place::Completed,
            11 => Place::Failed,
            12 => Place::Deleted,
            _ => return Err(Fault::said(StoreErrorKind::Internal, format!("{number} is no place of a job"))),
        })
    }

    pub(crate) fn state(self) -> State {
        match self {
            Place::Scheduled => State::Scheduled,
            Place::Ready | Place::Parked | Place::Reserved => State::Enqueued,
            Place::Running => State::Processing,
            Place::Awaiting => State::Awaiting,
            Place::Completed => State::Completed,
            Place::Failed => State::Failed,
            Place::Deleted => State::Deleted,
        }
    }

    /// The numbers of the places that people see as this state.
    pub(crate) fn numbers_of(state: State) -> &'static [i16] {
        match state {
            State::Scheduled => &[0],
            State::Enqueued => &[1, 2, 3],
            State::Awaiting => &[5],
            State::Processing => &[4],
            State::Completed => &[10],
            State::Failed => &[11],
            State::Deleted => &[12],
        }
    }
}

/// The name of an event of the history by its number.
pub(crate) fn event_name(number: i16) -> &'static str {
    match number {
        1 => "Created",
        2 => "Processing",
        3 => "Completed",
        4 => "Failed",
        5 => "Scheduled",
        6 => "Enqueued",
        7 => "Requeued",
        8 => "Deleted",
        9 => "CancellationRequested",
        _ => "Unknown",
    }
}
