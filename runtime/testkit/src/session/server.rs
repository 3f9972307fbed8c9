//! The function that a lock session calls (A2), as the server runs it: statement by statement, while others run.
//!
//! A step is what others can see or be seen by. Where the limits cannot change any more, reading one is no step of its own.

use std::collections::BTreeMap;

use warp_domain::ClaimToken;
use warp_domain::session::{Answer, Call, Grant, Lock, Reply, usable_slots};

use super::{Broken, Case, Key, World, broken};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pc {
    Read,
    /// The stamped limit is above `high`: commit it, begin again.
    Raise,
    Base,
    Look,
    Slot,
    Verify,
    /// Give back what the attempt has taken; then say this.
    Back(Refusal),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Refusal {
    /// Of this limit.
    Full(u32),
    /// Begin the attempt again: a limit changed.
    Again,
}

/// What a statement did, whether others can tell when it ran, and what is now.
type Statement = (String, bool, Result<(Server, World), Broken>);

/// A call that the server is at.
#[derive(Debug, Clone)]
pub(super) struct Server {
    call: Call<Key>,
    /// What the attempts of this call have: of those admitted, and of the one at hand.
    admitted: Vec<Lock<Key>>,
    taken: Vec<Lock<Key>>,
    grants: Vec<Grant<Key>>,
    fence: u64,
    place: usize,
    pc: Pc,
    limit: u32,
    high: u32,
    version: u64,
    below: u32,
    start: u32,
    tried: u32,
    held: Vec<bool>,
    answer: Answer<Key>,
}

impl Server {
    pub(super) fn new(call: Call<Key>) -> Self {
        let generation = call.generation;
        Server {
            call,
            admitted: Vec::new(),
            taken: Vec::new(),
            grants: Vec::new(),
            fence: 0,
            place: 0,
            pc: Pc::Read,
            limit: 0,
            high: 0,
            version: 0,
            below: 0,
            start: 0,
            tried: 0,
            held: Vec::new(),
            answer: Answer { generation, converted: Vec::new(), replies: Vec::new() },
        }
    }

    pub(super) fn is_over(&self) -> bool {
        let Call { generation: _, keep, unlocks, converts, asks } = &self.call;
        keep.is_none() && unlocks.is_empty() && converts.is_empty() && self.answer.replies.len() == asks.len()
    }

    pub(super) fn into_answer(self) -> Answer<Key> {
        self.answer
    }

    pub(super) fn asked(&self) -> impl Iterator<Item = ClaimToken> {
        self.call.asks.iter().map(|asked| asked.token)
    }

    /// Attempts of this call that have the key, verified.
    pub(super) fn verified(&self, key: Key) -> usize {
        let of = |grants: &[Grant<Key>]| grants.iter().filter(|grant| grant.key == key).count();
        let admitted = self.answer.replies.iter().map(|(_, reply)| match reply {
            Reply::Admitted { grants, .. } => of(grants),
            _ => 0,
        });
        admitted.sum::<usize>() + of(&self.grants)
    }

    /// Whether a belief about this key may be behind what the call is doing.
    pub(super) fn touches(&self, key: Key) -> bool {
        self.call.converts.contains(&key) || self.answer.converted.iter().any(|(converted, _)| *converted == key)
    }

    pub(super) fn fences(&self) -> Vec<u64> {
        let replies = self.answer.replies.iter().filter_map(|(_, reply)| match reply {
            Reply::Admitted { fence, .. } => Some(*fence),
            _ => None,
        });
        replies.chain([self.fence]).filter(|fence| *fence > 0).collect()
    }

    /// What the server may do next; more than one only where it starts at a random slot.
    pub(super) fn steps(self, world: &World, case: &Case, at: usize) -> Vec<(String, Result<World, Broken>)> {
        let mut all = Vec::new();
        let mut open = vec![(self, world.clone(), String::new())];
        while let Some((server, world, before)) = open.pop() {
            for (name, visible, result) in server.step(world, case, at) {
                let name = if before.is_empty() { name } else { format!("{before}, {name}") };
                match result {
                    Ok((server, world)) if !visible && !server.is_over() => open.push((server, world, name)),
                    Ok((server, mut world)) => {
                        world.hosts[at].call = Some(server);
                        all.push((name, Ok(world)));
                    }
                    Err(broken) => all.push((name, Err(broken))),
                }
            }
        }
        all
    }

    /// One statement.
    fn step(mut self, mut world: World, case: &Case, at: usize) -> Vec<Statement> {
        let limits_stand =
            !world.limit_open && world.next_limit >= case.limits.len() && world.keys.iter().all(|key| key.high >= case.limit);
        if let Some(keep) = self.call.keep.take() {
            for (number, key) in world.keys.iter_mut().enumerate() {
                let number = number as Key;
                if !keep.contains(&Lock::Whole(number)) {
                    key.whole.drop_all(at);
                }
                if !keep.contains(&Lock::Base(number)) {
                    key.base[at] = 0;
                }
                for (slot, owner) in key.slots.iter_mut().enumerate() {
                    if !keep.contains(&Lock::Slot(number, slot as u32)) {
                        owner.drop_all(at);
                    }
                }
            }
            return vec![("gives back what it does not know".to_owned(), true, Ok((self, world)))];
        }
        if !self.call.unlocks.is_empty() {
            let lock = self.call.unlocks.remove(0);
            world.unlock(at, lock);
            return vec![(format!("unlocks {lock:?}"), true, Ok((self, world)))];
        }
        if !self.call.converts.is_empty() {
            // Nobody else can have the base or a slot while the whole key is held, so the three statements are one step.
            let number = self.call.converts.remove(0);
            let key = &mut world.keys[usize::from(number)];
            // Begun again after a failure it takes only what it has not.
            if key.base[at] == 0 {
                key.base[at] = 1;
            }
            if key.slots[0].host.is_none() {
                key.slots[0].take(at);
            }
            key.whole.drop_all(at);
            self.answer.converted.push((number, key.reading()));
            return vec![(format!("makes key {number} a slot"), true, Ok((self, world)))];
        }
        let asked = &self.call.asks[self.answer.replies.len()];
        let step = asked.steps[self.place].clone();
        let token = asked.token;
        let last = self.place + 1 == asked.steps.len();
        let key = usize::from(step.key);
        let knows_itself = !broken!(case, CallForgetsItself);
        let in_call = |server: &Server, lock: Lock<Key>| knows_itself && server.admitted.contains(&lock) || server.taken.contains(&lock);
        match self.pc {
            Pc::Read => {
                if self.place == 0 && broken!(case, FenceBeforeLocks) {
                    self.fence = world.draw_fence();
                }
                let row = &world.keys[key];
                (self.limit, self.high, self.version) = (row.limit(step.limit), row.high, row.version);
                let forgets = broken!(case, HighIsForgotten);
                self.pc = if self.limit > self.high && !forgets { Pc::Raise } else { Pc::Base };
                if self.limit == 0 {
                    self.pc = Pc::Back(Refusal::Full(0));
                }
                vec![(format!("reads key {key}"), !limits_stand, Ok((self, world)))]
            }
            Pc::Raise => {
                let row = &mut world.keys[key];
                if row.high < self.limit {
                    row.high = self.limit;
                    row.version += 1;
                }
                self.pc = Pc::Back(Refusal::Again);
                vec![(format!("records limit {} of key {key}", self.limit), true, Ok((self, world)))]
            }
            Pc::Base if self.limit == 1 => {
                let row = &mut world.keys[key];
                let mine =
                    step.whole || !step.own.is_empty() || in_call(&self, Lock::Whole(step.key)) || in_call(&self, Lock::Base(step.key));
                let got = !mine && row.whole.is_free_for(at) && row.base[1 - at] == 0;
                if got {
                    row.whole.take(at);
                    self.taken.push(Lock::Whole(step.key));
                    self.pc = Pc::Verify;
                } else {
                    self.pc = Pc::Back(Refusal::Full(1));
                }
                vec![(format!("tries key {key} for job token {}: {}", token.0, if got { "got" } else { "held" }), true, Ok((self, world)))]
            }
            Pc::Base => {
                let row = &mut world.keys[key];
                let has = step.has_base || in_call(&self, Lock::Base(step.key));
                let others = step.whole || !row.whole.is_free_for(at) || in_call(&self, Lock::Whole(step.key));
                if step.whole || !has && others {
                    self.pc = Pc::Back(Refusal::Full(self.limit));
                    return vec![(format!("tries base of key {key}: held"), true, Ok((self, world)))];
                }
                if !has {
                    row.base[at] += 1;
                    self.taken.push(Lock::Base(step.key));
                }
                self.held.clear();
                self.below = self.limit;
                self.pc = if self.high > self.limit && !broken!(case, NoLookAbove) { Pc::Look } else { Pc::Slot };
                self.at_random_start(format!("tries base of key {key}: got"), !has, world)
            }
            Pc::Look => {
                self.held.push(world.keys[key].slots[self.held.len()].host.is_some());
                if self.held.len() < self.high as usize {
                    return vec![(format!("looks at key {key}"), true, Ok((self, world)))];
                }
                self.below = usable_slots(self.limit, &self.held);
                self.held.clear();
                self.pc = if self.below == 0 { Pc::Back(Refusal::Full(self.limit)) } else { Pc::Slot };
                let name = format!("looks at key {key}: slots below {}", self.below);
                self.at_random_start(name, true, world)
            }
            Pc::Slot => {
                let slot = (self.start + self.tried) % self.below;
                let lock = Lock::Slot(step.key, slot);
                let mine = step.own.contains(&slot) || in_call(&self, lock);
                let row = &mut world.keys[key];
                let got = !mine && row.slots[slot as usize].is_free_for(at);
                if got {
                    row.slots[slot as usize].take(at);
                    self.taken.push(lock);
                    self.pc = Pc::Verify;
                } else if self.tried + 1 < self.below {
                    self.tried += 1;
                } else {
                    self.pc = Pc::Back(Refusal::Full(self.limit));
                }
                vec![(format!("tries slot {slot} of key {key}: {}", if got { "got" } else { "held" }), true, Ok((self, world)))]
            }
            Pc::Verify => {
                let row = &world.keys[key];
                // Not of a key held exclusively: nobody else can be in, and a raise finds its holder (A11). To give it back
                // would leave those beside a free slot who were refused by it meanwhile and counted as running.
                let exclusive = self.limit == 1 && !broken!(case, VerifiesExclusive);
                if row.version != self.version && !exclusive && !broken!(case, NoVerify) {
                    self.pc = Pc::Back(Refusal::Again);
                    return vec![(format!("verifies key {key}: changed"), true, Ok((self, world)))];
                }
                let (limit, mut reading) = (row.limit(step.limit), row.reading());
                reading.version = self.version;
                let slot = self.taken.iter().rev().find_map(|lock| match *lock {
                    Lock::Slot(of, slot) if of == step.key => Some(slot),
                    _ => None,
                });
                self.grants.push(Grant { key: step.key, slot, reading });
                self.place += 1;
                self.pc = Pc::Read;
                (self.start, self.tried, self.below, self.limit, self.high, self.version) = (0, 0, 0, 0, 0, 0);
                let mut checked = world.clone();
                checked.hosts[at].call = Some(self.clone());
                let holders = checked.holders(step.key);
                if holders > limit {
                    return vec![(format!("verifies key {key}"), true, Err(format!("P1, P5: {holders} hold key {key} at limit {limit}")))];
                }
                if last {
                    self.admit(&mut world, case, token);
                }
                let name = format!("verifies key {key}{}", if last { ": admitted" } else { "" });
                let good = if last { world.check_fences(&self, case) } else { Ok(()) };
                vec![(name, !limits_stand || last, good.map(|()| (self, world)))]
            }
            Pc::Back(refusal) => {
                let keeps = broken!(case, RefusedKeepsEarlierKeys) && refusal != Refusal::Again;
                if let Some(lock) = self.taken.pop().filter(|_| !keeps) {
                    world.unlock(at, lock);
                    let more = !self.taken.is_empty();
                    if more {
                        return vec![(format!("gives back {lock:?}"), true, Ok((self, world)))];
                    }
                }
                self.taken.clear();
                self.grants.clear();
                let at_key = self.place;
                self.place = 0;
                self.pc = Pc::Read;
                (self.start, self.tried, self.below, self.limit, self.high, self.version) = (0, 0, 0, 0, 0, 0);
                match refusal {
                    Refusal::Again => vec![("begins again".to_owned(), true, Ok((self, world)))],
                    Refusal::Full(limit) => {
                        self.fence = 0;
                        self.answer.replies.push((token, Reply::Refused { at: at_key, limit }));
                        vec![(format!("refuses token {}", token.0), true, Ok((self, world)))]
                    }
                }
            }
        }
    }

    fn at_random_start(self, name: String, visible: bool, world: World) -> Vec<Statement> {
        if self.pc != Pc::Slot {
            return vec![(name, visible, Ok((self, world)))];
        }
        let from = |start| {
            let server = Server { start, tried: 0, ..self.clone() };
            (name.clone(), visible, Ok((server, world.clone())))
        };
        (0..self.below).map(from).collect()
    }

    fn admit(&mut self, world: &mut World, case: &Case, token: ClaimToken) {
        let fence = if broken!(case, FenceBeforeLocks) { self.fence } else { world.draw_fence() };
        self.fence = 0;
        self.place = 0;
        self.admitted.append(&mut self.taken);
        let grants = std::mem::take(&mut self.grants);
        self.answer.replies.push((token, Reply::Admitted { grants, fence }));
    }

    pub(super) fn last_admitted(&self) -> Option<(&[Grant<Key>], u64)> {
        match self.answer.replies.last() {
            Some((_, Reply::Admitted { grants, fence })) => Some((grants, *fence)),
            _ => None,
        }
    }

    pub(super) fn print(
        &self,
        print: &mut Vec<u8>,
        attempt: &dyn Fn(&ClaimToken) -> u8,
        lock: &dyn Fn(&Lock<Key>) -> u8,
        rank: &dyn Fn(u64) -> u8,
    ) {
        const END: u8 = 253;
        let Call { generation: _, keep, unlocks, converts, asks } = &self.call;
        print.push(u8::from(keep.is_some()));
        print.extend(unlocks.iter().map(lock));
        print.push(END);
        print.extend(converts);
        print.push(END);
        // What was known of the session when the call was built.
        for asked in asks {
            print.push(attempt(&asked.token));
            for step in &asked.steps {
                print.push(u8::from(step.has_base) + 2 * u8::from(step.whole));
                print.extend(step.own.iter().map(|slot| *slot as u8));
            }
        }
        print.push(END);
        for (token, reply) in &self.answer.replies {
            print.push(attempt(token));
            match reply {
                Reply::Admitted { grants, fence } => {
                    print.push(rank(*fence));
                    print.extend(grants.iter().flat_map(|grant| [grant.slot.map_or(9, |slot| slot as u8), grant.reading.version as u8]));
                }
                Reply::Refused { at, limit } => print.extend([100 + *at as u8, *limit as u8]),
                Reply::Again => print.push(110),
            }
        }
        print.push(END);
        for locks in [&self.admitted, &self.taken] {
            let mut locks: Vec<u8> = locks.iter().map(lock).collect();
            locks.sort_unstable();
            print.extend(locks);
            print.push(END);
        }
        print.extend(self.grants.iter().map(|grant| grant.reading.version as u8));
        print.extend(self.answer.converted.iter().flat_map(|(key, reading)| [*key, reading.version as u8]));
        let pc = match self.pc {
            Pc::Read => 0,
            Pc::Raise => 1,
            Pc::Base => 2,
            Pc::Look => 3,
            Pc::Slot => 4,
            Pc::Verify => 5,
            Pc::Back(Refusal::Again) => 6,
            Pc::Back(Refusal::Full(limit)) => 7 + limit as u8,
        };
        print.extend([pc, self.place as u8, self.limit as u8, self.high as u8, self.version as u8, self.below as u8]);
        print.extend([self.start as u8, self.tried as u8, rank(self.fence)]);
        print.extend(self.held.iter().map(|held| u8::from(*held)));
    }
}

impl World {
    fn unlock(&mut self, at: usize, lock: Lock<Key>) {
        let key = &mut self.keys[usize::from(lock.key())];
        match lock {
            Lock::Whole(_) => key.whole.give_back(at),
            Lock::Base(_) => key.base[at] = key.base[at].saturating_sub(1),
            Lock::Slot(_, slot) => key.slots[slot as usize].give_back(at),
        }
    }

    fn draw_fence(&mut self) -> u64 {
        let fence = self.next_fence;
        self.next_fence += 256;
        fence
    }

    /// Of two holders of a key at limit 1, the later has the larger fence.
    fn check_fences(&mut self, server: &Server, case: &Case) -> Result<(), Broken> {
        let Some((grants, fence)) = server.last_admitted() else { return Ok(()) };
        let mut before = BTreeMap::new();
        for grant in grants {
            let key = &mut self.keys[usize::from(grant.key)];
            if key.limit(case.limit) == 1 {
                before.insert(grant.key, key.last_fence);
            }
            key.last_fence = key.last_fence.max(fence);
        }
        match before.into_iter().find(|(_, last)| *last >= fence) {
            Some((key, last)) => Err(format!("fences: a holder of key {key} got {fence} after {last}")),
            None => Ok(()),
        }
    }
}
