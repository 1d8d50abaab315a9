//! The congestion-unaware network: a message takes what it would take alone.

use super::agenda::Agenda;
use super::engine::{Event, Message, Network, Shipment};

/// Wires without limits.
#[derive(Debug)]
pub(super) struct Unaware;

impl Network for Unaware {
    /// The arrival of a message.
    type Event = Message;

    fn send(&mut self, shipment: &Shipment<'_>, agenda: &mut Agenda<Event<Message>>) {
        let delay = shipment.phase.wires.delay_ns(shipment.offset, shipment.size);
        agenda.add(delay, Event::Network(shipment.message));
    }

    fn happen(&mut self, arrived: Message, _: &mut Agenda<Event<Message>>) -> Option<Message> {
        Some(arrived)
    }
}
