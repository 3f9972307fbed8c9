//! The story, scene by scene.

mod credits;
mod loot;
mod saves;
mod slots;
mod trades;

use std::time::Duration;

use anyhow::Result;

use crate::report::Rows;
use crate::stage::Theatre;

/// One scene.
pub struct Scene {
    /// What `--scene` calls it.
    pub letter: char,
    /// For people.
    pub title: &'static str,
    /// Plays it and adds its rows.
    pub play: fn(&Theatre, Size, &mut Rows) -> Result<()>,
}

/// In the order of the story.
pub const SCENES: &[Scene] = &[
    Scene { letter: 'a', title: "credits without a mutex", play: credits::without_mutex },
    Scene { letter: 'b', title: "credits under the player's mutex", play: credits::under_mutex },
    Scene { letter: 'c', title: "the same while hosts are killed", play: credits::under_fire },
    Scene { letter: 'd', title: "trades in opposite directions", play: trades::opposite },
    Scene { letter: 'e', title: "saves on ten connections", play: saves::ten_connections },
    Scene { letter: 'f', title: "saves that arrive in the wrong order", play: saves::wrong_order },
    Scene { letter: 'g', title: "a loot drop that fails between two writes", play: loot::half_done },
    Scene { letter: 'h', title: "slots released twice, by a stranger, and never", play: slots::released_wrongly },
];

/// How much of everything. What is expected follows from these numbers, so both sizes tell the same story.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Credits of 1,000 gold.
    pub credits: i64,
    /// How long a host lives in the scene that kills them.
    pub kill_every: Duration,
    /// How many are killed at most, so that the scene ends on a machine where one hardly starts within that time.
    pub kills: u32,
    /// Trades in each direction.
    pub trades: i64,
    /// Saves on the ten connections.
    pub saves: usize,
    /// Copies to be saved, each between two credits.
    pub copies: usize,
    /// Jobs that lose their connection.
    pub leaks: usize,
}

impl Size {
    /// The story as it is told.
    pub const FULL: Size =
        Size { credits: 3_000, kill_every: Duration::from_secs(1), kills: 30, trades: 300, saves: 600, copies: 40, leaks: 30 };
    /// For tests.
    pub const QUICK: Size =
        Size { credits: 300, kill_every: Duration::from_millis(500), kills: 3, trades: 40, saves: 60, copies: 8, leaks: 12 };
}
