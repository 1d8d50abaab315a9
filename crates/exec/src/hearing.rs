//! How ranks that are threads tell the one that listens what they see.
//!
//! The standard library's channels allocate while they carry messages; a run under way does not, so
//! this is a queue with room made in advance. It grows if a listener falls far behind.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A queue with one listener; it ends when the last of its speakers is gone.
pub(crate) fn hearing<T>(room: usize) -> (Speaker<T>, Listener<T>) {
    let said = Said { queue: VecDeque::with_capacity(room), speakers: 1 };
    let shared = Arc::new(Shared { said: Mutex::new(said), news: Condvar::new() });
    (Speaker(Arc::clone(&shared)), Listener(shared))
}

/// The end of one who tells.
#[derive(Debug)]
pub(crate) struct Speaker<T>(Arc<Shared<T>>);

/// The end of the one who hears.
#[derive(Debug)]
pub(crate) struct Listener<T>(Arc<Shared<T>>);

#[derive(Debug)]
struct Shared<T> {
    said: Mutex<Said<T>>,
    news: Condvar,
}

#[derive(Debug)]
struct Said<T> {
    queue: VecDeque<T>,
    speakers: usize,
}

impl<T> Shared<T> {
    /// A panic while the lock is held cannot leave the queue half changed.
    fn lock(&self) -> MutexGuard<'_, Said<T>> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Speaker<T> {
    pub(crate) fn say(&self, what: T) {
        self.0.lock().queue.push_back(what);
        self.0.news.notify_one();
    }
}

impl<T> Clone for Speaker<T> {
    fn clone(&self) -> Self {
        self.0.lock().speakers += 1;
        Self(Arc::clone(&self.0))
    }
}

impl<T> Drop for Speaker<T> {
    fn drop(&mut self) {
        self.0.lock().speakers -= 1;
        self.0.news.notify_one();
    }
}

impl<T> Iterator for Listener<T> {
    type Item = T;

    /// Waits for the next word, in the order in which they were said; none when nobody is left.
    fn next(&mut self) -> Option<T> {
        let silent = |said: &mut Said<T>| said.queue.is_empty() && said.speakers > 0;
        let said = self.0.news.wait_while(self.0.lock(), silent);
        said.unwrap_or_else(PoisonError::into_inner).queue.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_heard_in_order_until_all_have_left() {
        let (speaker, listener) = hearing(1);
        let heard: Vec<(u32, u32)> = std::thread::scope(|scope| {
            for who in 0..3 {
                let speaker = speaker.clone();
                scope.spawn(move || (0..50).for_each(|word| speaker.say((who, word))));
            }
            drop(speaker);
            listener.collect()
        });
        for who in 0..3 {
            let words = heard.iter().filter(|(from, _)| *from == who).map(|(_, word)| *word);
            assert!(words.eq(0..50));
        }
    }
}
