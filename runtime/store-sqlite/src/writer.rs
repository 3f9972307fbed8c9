//! The one writer of this process: a task that owns the writing connection.
//!
//! Callers send a command and wait for its answer. Nobody can drop the task between `BEGIN` and `COMMIT`, so a
//! caller that goes away leaves its command either done or not begun (slots.md C2). Commands that wait together
//! share one transaction, because the sync of the log costs more than all of them; each has a savepoint, so one
//! that fails takes nobody with it.
//!
//! Between processes the file's write lock decides. A transaction takes it with its first statement (`BEGIN
//! IMMEDIATE`), so none is ever refused halfway, and waits for it here instead of failing (A29).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use sqlx::{Connection as _, SqliteConnection};
use tokio::sync::{mpsc, oneshot};
use warp_store::{Result, StoreError, StoreErrorKind};

use crate::changes::Changes;
use crate::error::Fault;
use crate::schema::{self, OpenOptions};
use crate::work::Work;

/// Commands that may wait; beyond it callers wait to send.
const QUEUE: usize = 1024;
/// Commands that share one transaction.
const GROUP: usize = 64;
/// How long the write lock is waited for before a caller hears of it.
const PATIENCE: Duration = Duration::from_secs(30);
/// The longest pause between two tries to get it. SQLite's own waiting grows to a hundred milliseconds, which the
/// next holder of a key in this process would have to wait as well.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
/// After another process has written: for how long this one leaves it a gap after each of its own transactions.
/// Without it a busy process takes the lock again before the other has looked.
const COURTESY: Duration = Duration::from_millis(100);
const GAP: Duration = Duration::from_millis(1);

/// The callers' end.
#[derive(Clone)]
pub(crate) struct Writer {
    commands: mpsc::Sender<Box<dyn Command>>,
    path: Arc<PathBuf>,
}

/// Work to be done in a transaction, and somebody who waits for its result.
trait Command: Send {
    fn op(&self) -> &'static str;
    fn perform<'w>(self: Box<Self>, work: &'w mut Work) -> BoxFuture<'w, Done>;
    fn fail(self: Box<Self>, error: StoreError);
}

/// A command that has been performed and not yet committed.
struct Done {
    op: &'static str,
    /// The fault of the command itself, if it had one; it has already been told to the caller.
    failed: bool,
    answer: Option<Box<dyn Answer>>,
}

trait Answer: Send {
    fn tell(self: Box<Self>, lost: Option<StoreError>);
}

struct Typed<T, F> {
    op: &'static str,
    body: F,
    reply: oneshot::Sender<Result<T>>,
}

struct Ready<T> {
    value: T,
    reply: oneshot::Sender<Result<T>>,
}

impl<T: Send + 'static> Answer for Ready<T> {
    fn tell(self: Box<Self>, lost: Option<StoreError>) {
        let Ready { value, reply } = *self;
        // A caller that has gone away needs no answer.
        let _ = reply.send(lost.map_or(Ok(value), Err));
    }
}

impl<T, F> Command for Typed<T, F>
where
    T: Send + 'static,
    F: for<'w> FnOnce(&'w mut Work) -> BoxFuture<'w, std::result::Result<T, Fault>> + Send + 'static,
{
    fn op(&self) -> &'static str {
        self.op
    }

    fn perform<'w>(self: Box<Self>, work: &'w mut Work) -> BoxFuture<'w, Done> {
        Box::pin(async move {
            let Typed { op, body, reply } = *self;
            match body(&mut *work).await {
                Ok(value) => {
                    work.end_command();
                    Done { op, failed: false, answer: Some(Box::new(Ready { value, reply })) }
                }
                Err(fault) => {
                    let _ = reply.send(Err(fault.into_error(op, work.path())));
                    Done { op, failed: true, answer: None }
                }
            }
        })
    }

    fn fail(self: Box<Self>, error: StoreError) {
        let _ = self.reply.send(Err(error));
    }
}

impl Writer {
    /// Starts the task on the runtime of the caller.
    pub(crate) fn start(options: &OpenOptions, conn: SqliteConnection, changes: Arc<Changes>) -> Self {
        let path = Arc::new(options.path.clone());
        let (commands, queue) = mpsc::channel(QUEUE);
        let shell = Shell { path: path.clone(), work: Some(Work::new(conn, path.clone())), changes, others_wrote: None };
        tokio::spawn(shell.run(queue));
        Writer { commands, path }
    }

    /// Runs `body` in a transaction and answers after its commit. Dropping the future changes nothing about it.
    pub(crate) async fn run<T, F>(&self, op: &'static str, body: F) -> Result<T>
    where
        T: Send + 'static,
        F: for<'w> FnOnce(&'w mut Work) -> BoxFuture<'w, std::result::Result<T, Fault>> + Send + 'static,
    {
        let stopped = || StoreError::new(op, StoreErrorKind::Unavailable, format!("the writer of {} has stopped", self.path.display()));
        let (reply, answer) = oneshot::channel();
        self.commands.send(Box::new(Typed { op, body, reply })).await.map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?
    }
}

/// The task.
struct Shell {
    path: Arc<PathBuf>,
    /// `None` after a fault that may have spoiled the connection; the next command opens a new one.
    work: Option<Work>,
    changes: Arc<Changes>,
    /// When another process was last seen to have written.
    others_wrote: Option<Instant>,
}

impl Shell {
    async fn run(mut self, mut queue: mpsc::Receiver<Box<dyn Command>>) {
        let mut group = Vec::with_capacity(GROUP);
        while queue.recv_many(&mut group, GROUP).await > 0 {
            self.transact(&mut group).await;
            if !queue.is_empty() && self.others_wrote.is_some_and(|at| at.elapsed() < COURTESY) {
                tokio::time::sleep(GAP).await;
            }
        }
        if let Some(work) = self.work {
            let _ = work.into_connection().close().await;
        }
    }

    async fn transact(&mut self, group: &mut Vec<Box<dyn Command>>) {
        let mut work = match self.begin().await {
            Ok(work) => work,
            Err(fault) => {
                for command in group.drain(..) {
                    let op = command.op();
                    command.fail(self.error(op, &fault));
                }
                return;
            }
        };
        let shared = group.len() > 1;
        let mut done = Vec::with_capacity(group.len());
        let mut broken = None;
        for command in group.drain(..) {
            if let Some(fault) = &broken {
                let op = command.op();
                command.fail(self.error(op, fault));
                continue;
            }
            match perform(&mut work, command, shared).await {
                Ok(one) => done.push(one),
                Err((one, fault)) => {
                    done.extend(one);
                    broken = Some(fault);
                }
            }
        }
        let nothing_done = done.iter().all(|one| one.failed);
        let ended = match broken {
            Some(fault) => Err(fault),
            None if nothing_done => Err(Fault::Said(StoreErrorKind::Internal, "nothing to commit".to_owned())),
            None => work.commit().await,
        };
        match ended {
            Ok(()) => {
                // Before the answers: whoever goes on after one finds the change announced.
                self.changes.learn(work.sequence.wakes);
                for one in done {
                    if let Some(answer) = one.answer {
                        answer.tell(None);
                    }
                }
                self.work = Some(work);
            }
            Err(fault) => {
                if work.roll_back().await.is_ok() {
                    self.work = Some(work);
                }
                for one in done {
                    if let Some(answer) = one.answer {
                        answer.tell(Some(self.error(one.op, &fault)));
                    }
                }
            }
        }
    }

    fn error(&self, op: &'static str, fault: &Fault) -> StoreError {
        StoreError::new(op, fault.kind(), fault.text(&self.path))
    }

    /// Opens the connection if it was lost, and takes the write lock.
    async fn begin(&mut self) -> std::result::Result<Work, Fault> {
        let mut work = match self.work.take() {
            Some(work) => work,
            None => Work::new(SqliteConnection::connect_with(&schema::connect_options(&self.path, false)).await?, self.path.clone()),
        };
        let since = Instant::now();
        let mut pause = Duration::from_micros(250);
        loop {
            match work.begin().await {
                Ok(()) => {
                    self.changes.writer_looked(work.sequence.wakes);
                    if work.others_wrote() {
                        self.others_wrote = Some(Instant::now());
                    }
                    return Ok(work);
                }
                Err(fault) if fault.kind() == StoreErrorKind::Busy && since.elapsed() < PATIENCE => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Err(fault) => {
                    // A connection that still answers is kept: a full disk or a lock is not its fault.
                    if work.roll_back().await.is_ok() {
                        self.work = Some(work);
                    }
                    return Err(fault);
                }
            }
        }
    }
}

/// Performs one command of a group. The error says that the transaction as a whole is lost.
async fn perform(work: &mut Work, command: Box<dyn Command>, shared: bool) -> std::result::Result<Done, (Option<Done>, Fault)> {
    if shared {
        work.savepoint().await.map_err(|fault| (None, fault))?;
    }
    let done = command.perform(work).await;
    let settled = match (shared, done.failed) {
        (true, true) => work.undo_savepoint().await,
        (true, false) => work.release_savepoint().await,
        (false, _) => Ok(()),
    };
    match settled {
        Ok(()) => Ok(done),
        Err(fault) => Err((Some(done), fault)),
    }
}
