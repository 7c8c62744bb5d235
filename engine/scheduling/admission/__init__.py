"""Which request is admitted next: streams, what waits in them, and their shares. Knows no steps and no devices."""

from saccade.engine.scheduling.admission.admission import Admission
from saccade.engine.scheduling.admission.lead import AdmissionLead
from saccade.engine.scheduling.admission.streams import ServiceTime, StreamSettings, Submission

__all__ = ["Admission", "AdmissionLead", "ServiceTime", "StreamSettings", "Submission"]
