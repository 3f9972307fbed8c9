//! `run`: the host.

use crate::args::RunArgs;
use crate::config::Config;
use crate::failure::{Failure, Outcome};

/// Runs jobs until told to stop.
pub fn run(_args: RunArgs, _config: Config) -> Outcome {
    Err(Failure::usage("run is not part of this build"))
}
