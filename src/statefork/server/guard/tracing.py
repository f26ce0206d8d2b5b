"""OpenTelemetry spans, when an endpoint is configured and the extra `statefork[otel]` is installed; else nothing at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from statefork.errors import HostUnsupported

__all__ = ["Tracing"]


class Tracing:
    """Spans per request. Without an endpoint every method does nothing."""

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("statefork") if provider is not None else None

    @classmethod
    def start(cls, endpoint: str | None) -> Tracing:
        """`endpoint` is $OTEL_EXPORTER_OTLP_ENDPOINT, read by the command line."""
        if not endpoint:
            return cls()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise HostUnsupported(
                "OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is not installed",
                fix="pip install 'statefork[otel]'",
            ) from error
        provider = TracerProvider(resource=Resource.create({"service.name": "statefork"}))
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    @contextmanager
    def span(self, name: str, headers: Mapping[str, str] | None = None, **attributes: Any) -> Iterator[Any]:
        """The current span while it lasts, also in worker threads; a caller's `traceparent` is its parent."""
        if self._tracer is None:
            yield None
            return
        from opentelemetry.propagate import extract

        context = extract(dict(headers)) if headers is not None else None
        with self._tracer.start_as_current_span(name, context=context, attributes=attributes) as span:
            yield span

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()
