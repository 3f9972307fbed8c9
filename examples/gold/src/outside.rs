//! A table that is not the host's: the game's own database of saved players.
//!
//! It knows nothing of keys and slots. All it does is to remember the token of the copy that it holds, and to refuse
//! a copy that is not newer.

use std::collections::BTreeMap;

/// What a handler made under a player's lock, to be written whenever the way to the database is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy {
    /// Whose gold.
    pub player: u64,
    /// The fencing token of the run that made it.
    pub token: u64,
    /// How much.
    pub gold: i64,
}

/// The saved players.
#[derive(Debug, Default)]
pub struct SavedPlayers {
    rows: BTreeMap<u64, Copy>,
}

impl SavedPlayers {
    /// Writes a copy; `false` is a copy older than the one that is there, and changes nothing.
    pub fn save(&mut self, copy: Copy) -> bool {
        match self.rows.get(&copy.player) {
            Some(saved) if saved.token >= copy.token => false,
            _ => {
                self.rows.insert(copy.player, copy);
                true
            }
        }
    }

    /// What is saved of a player.
    pub fn gold(&self, player: u64) -> Option<i64> {
        self.rows.get(&player).map(|row| row.gold)
    }
}
