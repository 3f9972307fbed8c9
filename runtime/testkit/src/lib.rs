//! For tests only: the store of jobs as a model in memory, and the simulation that proves the slot ledger on it.
//!
//! - [`model`]: the rows and commands of a job store without a database. It decides nothing itself: like every
//!   driver it loads a view, asks `warp-domain`, and writes the answer, one command being one transaction.
//! - [`store`]: the model behind the `Store` trait, so that a driver can be compared with it.
//! - [`sim`]: several hosts on one model, a simulated clock, and a scheduler that interleaves their steps and breaks
//!   them off between any two. An [`oracle`] of its own keeps its own account of every start and every slot.
//! - [`diff`]: the same random commands on two stores, and everything that can be seen of both after each.
//! - [`explore`]: every interleaving of small cases, breadth first; and key rows as locks that are taken one by one.
//! - [`session`]: the same for session locks, with the host's table as the store uses it.
//!
//! What must stay true: nothing here reads a clock or a random source, so the same seed does the same. Nothing above
//! the store depends on this crate outside its tests.
//!
//! # Replaying a seed
//!
//! A failing simulation prints its seed, the broken promise and the last steps. The same seed again, with every
//! step printed:
//!
//! ```text
//! WARP_SIM_SEED=1234 cargo test -p warp-testkit replay -- --nocapture
//! ```
//!
//! `WARP_SIM_SEEDS=200000` runs as many seeds as one likes instead of the ten thousand of the normal test command.
//! `WARP_SIM_MUTATION` with a mutation's name as the table test prints it (`StaleView`, `Ledger(HeadOfLine)`) replays the
//! seed with that rule broken.

pub mod diff;
pub mod explore;
pub mod model;
pub mod oracle;
pub mod rng;
pub mod session;
pub mod sim;
pub mod store;
